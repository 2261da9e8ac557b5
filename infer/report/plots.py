"""The report's plots as PNG, after the paper's Figures 3 and 4. Knows rows, not how they were measured."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from infer.report.palette import LINES, MARKERS, WHO, color, faded
from infer.report.rows import PLACE, Row, groups, label, task

Part = Mapping[str, Any]
WIDE = 10.5  # inches of a figure
HIGH = 3.4  # of a panel
COLUMNS = 3  # panels beside each other
LEVELS = ("plain", "auto", "gsd")  # told as horizontal lines where k is the axis


class Plot(NamedTuple):
    """A figure of the report, and what is said below it; none is drawn for what was not measured."""

    part: str
    figure: Callable[[Part], Figure | None]
    caption: str


def draw(report: Mapping[str, Any]) -> dict[str, bytes]:
    """Those that there is something for, as PNG, by name."""
    found = {}
    for name, plot in PLOTS.items():
        figure = plot.figure(report[plot.part]) if report[plot.part] else None
        if figure is not None:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=150)
            found[name] = buffer.getvalue()
    return found


def rate_against_k(part: Part) -> Figure | None:
    """Tokens per second (right of Figures 3 and 4)."""
    return _against_k(part["rows"], "tokens_per_second", "tokens per second")


def acceptance_against_k(part: Part) -> Figure | None:
    """Accepted over drafted tokens (left of Figures 3 and 4)."""
    figure = _against_k(part["rows"], "acceptance_rate", "acceptance rate")
    for axis in figure.axes if figure else ():
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return figure


def _against_k(rows: Sequence[Row], measure: str, ylabel: str) -> Figure | None:
    """A panel for each prompt set and dtype, a line for each temperature."""
    if not any(row["decoder"] == "sdsat" and row[measure] is not None for row in rows):
        return None
    figure, panels = _panels(_by_set(rows), columns=_sets(rows))
    heats = sorted({row["temperature"] for row in rows})
    for axis, mine in panels:
        for decoder in ("sdsat", *LEVELS):
            for index, heat in enumerate(heats):
                now = [row for row in mine if (row["decoder"], row["temperature"]) == (decoder, heat)]
                fade = faded(decoder, 0.5 * index / max(1, len(heats) - 1))
                name = f"{label({'decoder': decoder, 'k': '*'})}, temperature {heat:g}"
                points = sorted((row["k"], row[measure]) for row in now if row[measure] is not None)
                if decoder == "sdsat":
                    marker = MARKERS[index % len(MARKERS)]
                    axis.plot(*zip(*points or [((), ())]), marker=marker, color=fade, label=name, zorder=3)
                elif points:
                    line = LINES[index % len(LINES)]
                    axis.axhline(points[0][1], linestyle=line, linewidth=1.3, color=fade, label=name)
        axis.set_xlabel("k, adaptive tokens")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _finish(figure, panels, ylabel=ylabel)


def time_of_rows(part: Part) -> Figure | None:
    """L(q), measured and at the device's limit, a panel for each dtype."""
    measured = {one["dtype"]: one for one in part["costs"]}
    limits = {one["dtype"]: one for one in part["limits"]}
    dtypes = list(dict.fromkeys((*measured, *limits)))
    if not dtypes:
        return None
    figure, panels = _panels({dtype: dtype for dtype in dtypes}, columns=COLUMNS)
    for axis, dtype in panels:
        if dtype in measured:
            one = measured[dtype]
            axis.plot(one["rows"], one["ms"], color=color("sdsat"), marker="o", label="measured step, L(q)")
        if dtype in limits:
            at, ms = zip(*limits[dtype]["forward_ms"])
            axis.plot(at, ms, color=color("plain"), linestyle="--", label="roofline of a forward")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("q, rows of a forward")
    return _finish(figure, panels, ylabel="milliseconds")


def acceptance_by_position(part: Part) -> Figure | None:
    """The share accepted at each place of a draft, at the lowest temperature; of sdsat with the largest k."""
    rows = [row for row in _coolest(part["rows"]) if row["acceptance_by_position"]]
    deepest = max((row["k"] for row in rows if row["decoder"] == "sdsat"), default=0)
    rows = [row for row in rows if row["decoder"] != "sdsat" or row["k"] == deepest]
    if not rows:
        return None
    figure, panels = _panels(_by_set(rows), columns=_sets(rows))
    for axis, mine in panels:
        for index, row in enumerate(mine):
            shares = row["acceptance_by_position"]
            axis.plot(
                range(1, len(shares) + 1),
                shares,
                color=color(row["decoder"]),
                marker=MARKERS[index % len(MARKERS)],
                markersize=4,
                linestyle="--" if row["peer"] else "-",
                label=label(row),
            )
        axis.set_xlabel("place in the draft")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return _finish(figure, panels, ylabel="accepted, of drafts so deep")


def speedup_by_set(part: Part) -> Figure | None:
    """Bars with 95 % intervals at the lowest temperature: every decoder, sdsat with its fastest k."""
    rows = _fastest_k(
        [row for row in _coolest(part["rows"]) if row["decoder"] not in ("plain", "base") and row["speedup"]]
    )
    if not rows:
        return None
    by_dtype = {key[0]: mine for key, mine in groups(rows, "dtype").items()}
    figure, panels = _panels(by_dtype, columns=1)
    for axis, mine in panels:
        sets = list(dict.fromkeys(row["prompt_set"] for row in mine))
        decoders = {row["decoder"]: label({**row, "k": "*"}) for row in mine}
        width = 0.84 / len(decoders)
        for place, (decoder, name) in enumerate(decoders.items()):
            own = [row for row in mine if row["decoder"] == decoder]
            at = [sets.index(row["prompt_set"]) - 0.42 + width * (place + 0.5) for row in own]
            axis.bar(
                at,
                [row["speedup"] for row in own],
                0.92 * width,
                yerr=_errors(own, "speedup", "speedup_interval"),
                error_kw={"elinewidth": 1, "capsize": 2},
                color=color(decoder),
                hatch="///" if own[0]["peer"] else None,
                edgecolor="white",
                linewidth=0,
                label=name,
            )
        axis.axhline(1, color=color("plain"), linewidth=1.2, label="plain decoding")
        axis.set_xticks(range(len(sets)), [name.replace("_", " ") for name in sets])
        axis.tick_params(axis="x", length=0)
        axis.grid(visible=False, axis="x")
    return _finish(figure, panels, ylabel="speedup over plain decoding")


def scores(part: Part) -> Figure | None:
    """Bars with 95 % intervals: the base model's scores beside the model's, both decoded plainly."""
    rows = [row for row in part["rows"] if row["decoder"] == "plain"]
    if not rows:
        return None
    places = groups(rows, *PLACE)
    figure = Figure(figsize=(WIDE, 1.1 + 0.36 * len(places)), layout="constrained")
    axis = figure.subplots()
    for offset, who in ((-0.19, "base"), (0.19, "model")):
        found = [(at, row) for at, mine in enumerate(places.values()) for row in mine if row["who"] == who]
        if found:
            own = [row for _, row in found]
            axis.barh(
                [at + offset for at, _ in found],
                [row["value"] for row in own],
                0.36,
                xerr=_errors(own, "value", "interval"),
                error_kw={"elinewidth": 1, "capsize": 2},
                color=WHO[who],
                label={"base": "base model", "model": "fine-tuned model"}[who],
            )
    names = [
        f"{task(mine[0])}, {mine[0]['metric']}"
        + (f", temperature {mine[0]['temperature']:g}" if mine[0]["temperature"] else "")
        for mine in places.values()
    ]
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.grid(alpha=0.3, axis="x")
    axis.set_axisbelow(True)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


PLOTS = {
    "tokens_per_second": Plot(
        "speed",
        rate_against_k,
        "Tokens per second against k, as on the right of the paper's Figures 3 and 4. Paler lines are of "
        "higher temperatures.",
    ),
    "acceptance_rate": Plot(
        "speed",
        acceptance_against_k,
        "Accepted over drafted tokens against k, as on the left of the paper's Figures 3 and 4.",
    ),
    "speedup": Plot(
        "speed",
        speedup_by_set,
        "Speedup over plain decoding at the lowest temperature, with 95 % intervals; k=* is the fastest k of "
        "each prompt set, hatched bars are peers.",
    ),
    "acceptance_by_position": Plot(
        "speed",
        acceptance_by_position,
        "Share of the drafts accepted at each place, of the steps that drafted so deep, at the lowest "
        "temperature.",
    ),
    "time_of_rows": Plot(
        "speed",
        time_of_rows,
        "Time of a step by the rows of its forward: the flatter it is, the less a draft costs.",
    ),
    "scores": Plot(
        "quality", scores, "Scores of the base model and of the fine-tuned one, with 95 % intervals."
    ),
}


def _coolest(rows: Sequence[Row]) -> list[Row]:
    lowest = min((row["temperature"] for row in rows), default=0)
    return [row for row in rows if row["temperature"] == lowest]


def _fastest_k(rows: Sequence[Row]) -> list[Row]:
    """Of each decoder's rows in a prompt set and dtype the fastest one."""
    found = groups(rows, "prompt_set", "dtype", "decoder").values()
    return [max(mine, key=lambda row: row["speedup"]) for mine in found]


def _errors(rows: Sequence[Row], name: str, interval: str) -> list[list[float]]:
    """How far the ends of the intervals lie below and above the values."""
    ends = [row[interval] or (row[name], row[name]) for row in rows]
    below = [max(0.0, row[name] - low) for row, (low, _) in zip(rows, ends)]
    return [below, [max(0.0, high - row[name]) for row, (_, high) in zip(rows, ends)]]


def _by_set(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by prompt set, and by dtype where there are several."""
    found = groups(rows, "dtype", "prompt_set").items()
    several = len({dtype for (dtype, _), _ in found}) > 1
    return {f"{name}, {dtype}" if several else name: mine for (dtype, name), mine in found}


def _sets(rows: Sequence[Row]) -> int:
    """Panels beside each other: a dtype's prompt sets, as far as there is room."""
    return min(COLUMNS, len({row["prompt_set"] for row in rows}))


def _panels(contents: Mapping[str, Any], *, columns: int) -> tuple[Figure, list[tuple[Axes, Any]]]:
    """A figure with a panel for each content, under its name."""
    columns = min(columns, len(contents))
    rows = -(-len(contents) // columns)
    figure = Figure(figsize=(WIDE, HIGH * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
    panels = []
    for name, content in contents.items():
        axis = next(axes)
        axis.set_title(name.replace("_", " "), fontsize="medium")
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        panels.append((axis, content))
    for axis in axes:
        axis.set_visible(False)
    return figure, panels


def _finish(figure: Figure, panels: Sequence[tuple[Axes, Any]], *, ylabel: str) -> Figure:
    """Once every panel is drawn: they share the axis, and a limit set earlier would cut the later ones."""
    panels[0][0].set_ylim(bottom=0)
    figure.supylabel(ylabel, fontsize="medium")
    for axis, _ in panels:
        axis.tick_params(labelleft=True)
    entries = {name: handle for axis, _ in panels for handle, name in zip(*axis.get_legend_handles_labels())}
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize="small"
    )
    return figure
