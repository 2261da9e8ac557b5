"""The report's plots, after the paper's Figures 3 and 4: panels as inline SVG for the page, one PNG for files.

A plot is a list of panels, each a title and a function that draws on an axis. Knows rows, not how they were
measured.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from conf.console import label as spelled
from conf.html import LIGHT, inline_svg, plot_style
from infer.report.rows import LABELS, PLACE, Row, groups, label, task

Measured = Mapping[str, Any]
WIDTH, HEIGHT = 4.3, 2.7  # inches of a panel
COLUMNS = 3  # panels beside each other, in a file
STYLES = {  # of a decoder in every plot: its colour and its line
    "plain": ("grey", "-"),
    "base": ("grey", ":"),
    "sdsat": ("blue", "-"),
    "adaptive": ("indigo", "--"),
    "auto": ("orange", "-"),
    "ngrams": ("wine", "-."),
    "prompt lookup": ("brown", ":"),
    "ssd": ("sky", "-"),
    "tsd": ("green", "--"),
    "gsd": ("purple", "-."),
    "gsd probes": ("gold", ":"),
}
PEER = ("silver", "--")
DASHES = {"None": "", "-": "", "--": "7 3", "-.": "7 3 2 3", ":": "2 3"}
LEVELS = ("plain", "adaptive", "auto", "gsd")  # horizontal lines where k is the axis
BY_PLACE = ("sdsat", "adaptive", "auto", "ngrams", "gsd")  # drawn by place; more lines hide each other
ENOUGH = 20  # drafts that reached a place, at least, for a point of the plot
PERCENT = PercentFormatter(1, decimals=0)
MARKERS = ("o", "s", "^", "D", "v", "P")


class Panel(NamedTuple):
    """A part of a plot."""

    title: str
    draw: Callable[[Axes], None]
    height: float = HEIGHT


class Plot(NamedTuple):
    """A plot of a part of the report, and what is said below it; without panels it is left out."""

    part: str
    panels: Callable[[Measured], list[Panel]]
    caption: str


class Drawing(NamedTuple):
    """A plot that was drawn: markup of its panels and of its legend, and all of it as a PNG."""

    panels: list[str]
    legend: str
    png: bytes
    caption: str


def draw(report: Mapping[str, Any]) -> dict[str, Drawing]:
    """Return the plots that have something to show, by name."""
    drawings = {}
    for name, plot in PLOTS.items():
        panels = plot.panels(report[plot.part]) if report[plot.part] else []
        if panels:
            drawings[name] = _drawing(panels, plot.caption, name)
    return drawings


def _drawing(panels: Sequence[Panel], caption: str, name: str) -> Drawing:
    markup, entries = list[str](), dict[str, Any]()
    with plot_style():
        for panel in panels:
            figure = Figure(figsize=(WIDTH, panel.height), layout="constrained")
            axis = _draw_panel(figure.subplots(), panel)
            markup.append(inline_svg(figure, f"{name.replace('_', ' ')}: {panel.title}"))
            entries |= {text: handle for handle, text in zip(*axis.get_legend_handles_labels())}
        columns = min(COLUMNS, len(panels))
        lines = -(-len(panels) // columns)
        figure = Figure(figsize=(WIDTH * columns, max(panel.height for panel in panels) * lines + 0.5), dpi=150)
        figure.set_layout_engine("constrained")
        axes = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axis, panel in zip(axes, panels):
            _draw_panel(axis, panel)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        if entries:
            figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    legend = "".join(_legend_entry(text, handle) for text, handle in entries.items())
    return Drawing(markup, f'<div class="lines">{legend}</div>' if legend else "", buffer.getvalue(), caption)


def _draw_panel(axis: Axes, panel: Panel) -> Axes:
    axis.set_title(spelled(panel.title))
    panel.draw(axis)
    return axis


def _legend_entry(text: str, handle: Any) -> str:
    line = handle[0] if isinstance(handle, ErrorbarContainer) else handle
    color = to_hex(line.get_color())
    variable = next(name for name, light in LIGHT.items() if light == color)
    dash, fade = DASHES[line.get_linestyle()], line.get_alpha() or 1
    return (
        f'<span><svg viewBox="0 0 28 10" aria-hidden="true"><line x2="28" y1="5" y2="5" stroke-width="2.5" '
        f'stroke="var(--{variable})" stroke-dasharray="{dash}" stroke-opacity="{fade:g}"/></svg>'
        f"{escape(text)}</span>"
    )


def line_of(decoder: str) -> dict[str, Any]:
    """Return a decoder's colour and line, as matplotlib takes them."""
    color, line = STYLES.get(decoder, PEER)
    return {"color": LIGHT[color], "linestyle": line}


def by_set(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows by prompt set, and by dtype where there are several."""
    by_dtype = groups(rows, "dtype")
    return {
        name.replace("_", " ") + (f", {dtype}" if len(by_dtype) > 1 else ""): mine
        for (dtype,), own in by_dtype.items()
        for (name,), mine in groups(own, "prompt_set").items()
    }


def coolest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the lowest temperature."""
    lowest = min((row["temperature"] for row in rows), default=0)
    return [row for row in rows if row["temperature"] == lowest]


def speedups(part: Measured) -> list[Panel]:
    """Plot bars with 95 % intervals at the lowest temperature; sdsat (paper) with its fastest k."""
    rows = [row for row in coolest(part["rows"]) if row["decoder"] not in ("plain", "base") and row["speedup"]]
    fastest = [
        max(mine, key=lambda row: row["speedup"])
        for mine in groups(rows, "prompt_set", "dtype", "decoder").values()
    ]
    top = 1.12 * max((max(row["speedup_interval"] or [row["speedup"]]) for row in fastest), default=1)
    return [
        Panel(name, partial(_bars, rows=mine, top=top), 0.9 + 0.24 * len(mine))
        for name, mine in by_set(fastest).items()
    ]


def _bars(axis: Axes, rows: Sequence[Row], top: float) -> None:
    places, values = range(len(rows)), [row["speedup"] for row in rows]
    axis.barh(places, values, 0.7, color=[line_of(row["decoder"])["color"] for row in rows])
    axis.errorbar(values, places, xerr=_errors(rows, "speedup", "speedup_interval"), **_WHISKERS)
    axis.axvline(1, color=LIGHT["ink"], linewidth=1)
    for place, row in zip(places, rows):
        end = max(row["speedup_interval"] or [row["speedup"]])
        axis.text(end + 0.015 * top, place, f"{row['speedup']:.2f}", va="center", fontsize=8)
    axis.set_yticks(places, [spelled(label(row)) for row in rows])
    axis.set(xlim=(0, top), ylim=(len(rows) - 0.4, -0.6), xlabel="times plain decoding's speed (line: 1)")
    axis.tick_params(axis="y", length=0)
    axis.grid(visible=False, axis="y")


def against_k(part: Measured, measure: str, name: str, *, share: bool = False) -> list[Panel]:
    """Plot a measure against k (Figures 3 and 4), a line for each decoder and temperature."""
    rows = [row for row in part["rows"] if row["decoder"] in ("sdsat", *LEVELS) and row[measure] is not None]
    if not any(row["decoder"] == "sdsat" for row in rows):
        return []
    heats = sorted({row["temperature"] for row in rows})
    top = 1.08 * max(row[measure] for row in rows)

    def panel(axis: Axes, mine: Sequence[Row]) -> None:
        for (decoder, heat), own in groups(mine, "decoder", "temperature").items():
            style = line_of(decoder) | {"alpha": 1 - 0.6 * heats.index(heat) / max(1, len(heats) - 1)}
            text = NAMES.get(decoder, decoder)
            if len(heats) > 1:
                text += f", temperature {heat:g}" if heat else ", greedy"
            points = sorted((row["k"], row[measure]) for row in own)
            if decoder == "sdsat":
                marker = MARKERS[heats.index(heat) % len(MARKERS)]
                axis.plot(*zip(*points), marker=marker, markersize=4, label=text, zorder=3, **style)
            else:
                axis.axhline(points[0][1], linewidth=1.5, label=text, **style)
        axis.set(xlabel="k, adaptive tokens", ylabel=name, ylim=(0, top))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if share:
            axis.yaxis.set_major_formatter(PERCENT)

    return [Panel(name, partial(panel, mine=mine)) for name, mine in by_set(rows).items()]


def acceptance_by_place(part: Measured) -> list[Panel]:
    """Plot the share accepted at each place, of the drafts that reached it, with 95 % intervals.

    It is of the lowest temperature, and of sdsat (paper) with the largest k.
    """
    rows = [row for row in coolest(part["rows"]) if row["decoder"] in BY_PLACE]
    rows = [row for row in rows if row["acceptance_where_reached"]]
    deepest = max((row["k"] for row in rows if row["decoder"] == "sdsat"), default=0)
    rows = [row for row in rows if row["decoder"] != "sdsat" or row["k"] == deepest]
    return [Panel(name, partial(_places, rows=mine)) for name, mine in by_set(rows).items()]


def _places(axis: Axes, rows: Sequence[Row]) -> None:
    for index, row in enumerate(rows):
        shares = row["acceptance_where_reached"]
        counts = row["reached"] or [ENOUGH] * len(shares)
        places = [at for at, count in enumerate(counts) if count >= ENOUGH]
        lows, highs = (row[f"acceptance_where_reached_{end}"] or shares for end in ("low", "high"))
        ends = [(shares[at], max(0, shares[at] - lows[at]), max(0, highs[at] - shares[at])) for at in places]
        values, below, above = zip(*ends) if ends else ((), (), ())
        axis.errorbar(
            [at + 1 + 0.08 * (index - len(rows) / 2) for at in places],
            values,
            yerr=(below, above),
            elinewidth=0.8,
            marker=MARKERS[index % len(MARKERS)],
            markersize=3.5,
            label=label(row),
            **line_of(row["decoder"]),
        )
    axis.set(xlabel="place in the draft", ylabel="accepted", ylim=(0, 1.03))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.yaxis.set_major_formatter(PERCENT)


def time_of_rows(part: Measured) -> list[Panel]:
    """Plot L(q), measured and at the device's limit, a panel for each dtype."""
    measured = {entry["dtype"]: entry for entry in part["costs"]}
    limits = {entry["dtype"]: entry for entry in part["limits"]}

    def panel(axis: Axes, dtype: str) -> None:
        most = float("inf")
        if dtype in measured:
            rows, ms = measured[dtype]["rows"], measured[dtype]["ms"]
            most = max(rows)
            axis.plot(rows, ms, color=LIGHT["blue"], marker="o", markersize=4, label="measured step, L(q)")
        if dtype in limits:
            points = [point for point in limits[dtype]["forward_ms"] if point[0] <= most]
            axis.plot(*zip(*points), color=LIGHT["grey"], linestyle="--", label="least time of a forward")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set(xlabel="q, rows of a forward", ylabel="milliseconds")
        axis.set_ylim(bottom=0)

    dtypes = dict.fromkeys((*measured, *limits))
    return [Panel(dtype, partial(panel, dtype=dtype)) for dtype in dtypes]


def scores(part: Measured) -> list[Panel]:
    """Plot scores with 95 % intervals: the base model's beside the model's, both decoded plainly."""
    rows = [row for row in part["rows"] if row["decoder"] == "plain"]
    places = list(groups(rows, *PLACE).values())

    def panel(axis: Axes) -> None:
        for who, text, color, offset in (
            ("base", "base model", "grey", -0.15),
            ("model", "fine-tuned model", "blue", 0.15),
        ):
            own = [(at + offset, row) for at, mine in enumerate(places) for row in mine if row["who"] == who]
            if own:
                at, mine = zip(*own)
                values, ends = [row["value"] for row in mine], _errors(mine, "value", "interval")
                axis.errorbar(values, at, xerr=ends, fmt="o", color=LIGHT[color], capsize=2, label=text)
        axis.set_yticks(range(len(places)), [spelled(_score_name(mine[0])) for mine in places])
        axis.set(ylim=(len(places) - 0.5, -0.5))
        axis.set_xlim(left=-0.01)
        axis.xaxis.set_major_formatter(PERCENT)
        axis.grid(visible=False, axis="y")

    worth = any(row["value"] for row in rows)
    return [Panel("scores", panel, 1.0 + 0.3 * len(places))] if worth else []


def _score_name(row: Row) -> str:
    heat = f", t={row['temperature']:g}" if row["temperature"] else ""
    return f"{task(row)}, {row['metric']}{heat}"


def training_curves(part: Measured) -> list[Panel]:
    """Plot losses, and held-out acceptance by place, against the step."""
    log, held_out = part["log"], part["validation"]
    steps = [row["step"] for row in held_out]

    def losses(axis: Axes) -> None:
        curves = (("standard_loss", "blue", "next token"), ("masked_loss", "orange", "adaptive tokens"))
        held = {"linestyle": "--", "marker": "o", "markersize": 4}
        for name, color, text in curves:
            for rows, where, style in ((log, "training", {"linewidth": 1.2}), (held_out, "held out", held)):
                points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
                if points:
                    axis.plot(*zip(*points), color=LIGHT[color], label=f"{text}, {where}", **style)
        axis.set(xlabel="step", ylabel="loss")
        axis.set_ylim(bottom=0)

    def acceptance(axis: Axes) -> None:
        accepted = [row.get("accepted") for row in held_out]
        axis.plot(steps, accepted, color=LIGHT["green"], marker="o", markersize=4)
        axis.set(xlabel="step", ylabel="drafts accepted in a row")
        axis.set_ylim(bottom=0)

    panels = [Panel("losses", losses)] if log or held_out else []
    if any(row.get("accepted") is not None for row in held_out):
        panels.append(Panel("drafts of adaptive tokens, held out", acceptance))
    return panels


def _errors(rows: Sequence[Row], name: str, interval: str) -> list[list[float]]:
    """Return how far the ends of the intervals lie below and above the values."""
    ends = [row[interval] or (row[name], row[name]) for row in rows]
    below = [max(0.0, row[name] - low) for row, (low, _) in zip(rows, ends)]
    return [below, [max(0.0, high - row[name]) for row, (_, high) in zip(rows, ends)]]


_WHISKERS: dict[str, Any] = {"fmt": "none", "ecolor": LIGHT["ink"], "elinewidth": 1, "capsize": 2}
NAMES = {"sdsat": "sdsat (paper) k", **LABELS}
PLOTS = {
    "speedup": Plot(
        "speed",
        speedups,
        "Speedup over plain decoding at the lowest temperature, with 95 % intervals; grey bars are other "
        "libraries' decoding.",
    ),
    "acceptance_by_position": Plot(
        "speed",
        acceptance_by_place,
        "Share of the drafts accepted at each place, of those whose earlier places were all accepted, with "
        f"95 % intervals; places that fewer than {ENOUGH} drafts reached are left out.",
    ),
    "tokens_per_second": Plot(
        "speed",
        partial(against_k, measure="tokens_per_second", name="tokens per second"),
        "Tokens per second against k, as on the right of the paper's Figures 3 and 4. Paler lines are of "
        "higher temperatures.",
    ),
    "acceptance_rate": Plot(
        "speed",
        partial(against_k, measure="acceptance_rate", name="acceptance rate", share=True),
        "Accepted drafts over k against k, as on the left of the paper's Figures 3 and 4.",
    ),
    "time_of_rows": Plot(
        "speed",
        time_of_rows,
        "Time of a step by the rows of its forward: the flatter it is, the less a draft costs.",
    ),
    "scores": Plot(
        "quality", scores, "Scores of the base model and of the fine-tuned one, with 95 % intervals."
    ),
    "training": Plot(
        "training",
        training_curves,
        "Losses of training, averaged over a hundredth of the steps, and of held-out data; and how many drafts "
        "of adaptive tokens are right in a row on held-out data.",
    ),
}
