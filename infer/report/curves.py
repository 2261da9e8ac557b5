"""Figures of lines: speed and acceptance against k and by place, and the time of a forward by its rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from infer.report.palette import LINES, MARKERS, color, faded
from infer.report.panels import COLUMNS, by_set, coolest, finish, panels, sets
from infer.report.rows import LABELS, Row, label

Part = Mapping[str, Any]
NAMES = {"sdsat": "sdsat (paper) k", **LABELS}
LEVELS = ("plain", "adaptive", "auto", "gsd")  # told as horizontal lines where k is the axis


def rate_against_k(part: Part) -> Figure | None:
    """Tokens per second (right of Figures 3 and 4)."""
    return _against_k(part["rows"], "tokens_per_second", "tokens per second")


def acceptance_against_k(part: Part) -> Figure | None:
    """Accepted drafts over k (left of Figures 3 and 4)."""
    figure = _against_k(part["rows"], "acceptance_rate", "acceptance rate")
    for axis in figure.axes if figure else ():
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return figure


def _against_k(rows: Sequence[Row], measure: str, ylabel: str) -> Figure | None:
    """A panel for each prompt set and dtype, a line for each temperature."""
    if not any(row["decoder"] == "sdsat" and row[measure] is not None for row in rows):
        return None
    figure, shown = panels(by_set(rows), columns=sets(rows))
    heats = sorted({row["temperature"] for row in rows})
    for axis, mine in shown:
        for decoder in ("sdsat", *LEVELS):
            for index, heat in enumerate(heats):
                now = [row for row in mine if (row["decoder"], row["temperature"]) == (decoder, heat)]
                fade = faded(decoder, 0.5 * index / max(1, len(heats) - 1))
                name = f"{NAMES.get(decoder, decoder)}, temperature {heat:g}"
                points = sorted((row["k"], row[measure]) for row in now if row[measure] is not None)
                if decoder == "sdsat":
                    marker = MARKERS[index % len(MARKERS)]
                    axis.plot(*zip(*points or [((), ())]), marker=marker, color=fade, label=name, zorder=3)
                elif points:
                    line = LINES[index % len(LINES)]
                    axis.axhline(points[0][1], linestyle=line, linewidth=1.3, color=fade, label=name)
        axis.set_xlabel("k, adaptive tokens")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    decoders = {row["decoder"] for row in rows if row[measure] is not None} & {"sdsat", *LEVELS}
    return finish(figure, shown, ylabel=ylabel, legend=len(decoders))


def time_of_rows(part: Part) -> Figure | None:
    """L(q), measured and at the device's limit, a panel for each dtype."""
    measured = {one["dtype"]: one for one in part["costs"]}
    limits = {one["dtype"]: one for one in part["limits"]}
    dtypes = list(dict.fromkeys((*measured, *limits)))
    if not dtypes:
        return None
    figure, shown = panels({dtype: dtype for dtype in dtypes}, columns=COLUMNS)
    for axis, dtype in shown:
        if dtype in measured:
            one = measured[dtype]
            axis.plot(one["rows"], one["ms"], color=color("sdsat"), marker="o", label="measured step, L(q)")
        if dtype in limits:
            most = max(measured[dtype]["rows"]) if dtype in measured else float("inf")
            axis.plot(
                *zip(*[point for point in limits[dtype]["forward_ms"] if point[0] <= most]),
                color=color("plain"),
                linestyle="--",
                label="roofline of a forward",
            )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("q, rows of a forward")
    return finish(figure, shown, ylabel="milliseconds")


def acceptance_by_position(part: Part) -> Figure | None:
    """The share accepted at each place of a draft, at the lowest temperature; of sdsat with the largest k."""
    rows = [row for row in coolest(part["rows"]) if row["acceptance_by_position"]]
    deepest = max((row["k"] for row in rows if row["decoder"] == "sdsat"), default=0)
    rows = [row for row in rows if row["decoder"] != "sdsat" or row["k"] == deepest]
    if not rows:
        return None
    figure, shown = panels(by_set(rows), columns=sets(rows))
    for axis, mine in shown:
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
    return finish(figure, shown, ylabel="accepted, of drafts so deep")
