"""Plots of a report: SVG elements with one panel, in the text colour of the page."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from conf.console import label
from conf.pages import COLOURS, HEIGHT, INK, Draw, svg
from infer.bench.gsd_plots import gsd_draws
from infer.bench.names import BASE, PEER, PLAIN
from infer.bench.sdsat_plots import sdsat_draws
from infer.bench.statistics import Report, Row, grouped
from infer.bench.tables import POSITIONS, sampling, set_marks

PEER_COLOUR = COLOURS[4]


def plots_of(report: Report, part: str) -> dict[str, str]:
    """Return the plots of a finished part by title, as SVG elements."""
    if part == "speed":
        rows = report["speed"]["rows"]
        roofline = report["speed"]["roofline"]
        draws = {**speedup_draws(rows), **survival_draws(rows), **sdsat_draws(rows)}
        draws["Cost of a forward"] = partial(draw_roofline, roofline)
        heights = {
            name: bars_height(group) for name, group in speed_panels(rows).items()
        }
    elif part == "gsd":
        draws, heights = gsd_draws(report["gsd"]["rows"]), {}
    else:
        return {}
    return {
        title: svg(draw, title, height=heights.get(title, HEIGHT))
        for title, draw in draws.items()
    }


def speed_panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of the drafting decoders, by the title of their plot of speedups."""
    drafting = [row for row in rows if row["decoder"] != PLAIN]
    panels = {}
    for (prompt_set, temperature), group in grouped(
        drafting, "prompt_set", "temperature"
    ):
        group_name = ", ".join([prompt_set, sampling(temperature), *set_marks(group)])
        panels[f"Speedup over plain decoding: {group_name}"] = group
    return panels


def speedup_draws(rows: Sequence[Row]) -> dict[str, Draw]:
    """Return the plots of speedups, one for each prompt set and temperature."""
    panels = speed_panels(rows)
    ends = [
        end
        for group in panels.values()
        for row in group
        for end in (row["speedup"], *(row["speedup_interval"] or ()))
    ]
    top = 1.05 * max([1, *ends])  # one axis, so that bars of two plots can be compared
    return {
        title: partial(draw_speedups, group, top=top) for title, group in panels.items()
    }


def bars_height(rows: Sequence[Row]) -> float:
    """Return the height in inches of a panel with a bar for each row."""
    return 0.8 + 0.25 * len(rows)


def draw_speedups(rows: Sequence[Row], axes: Axes, *, top: float) -> None:
    """Draw speedups with intervals on an axis up to `top`, and rows with marks in pale colours."""
    for row in reversed(rows):
        peer = row["decoder"].startswith((PEER, BASE))
        ends = row["speedup_interval"] or ()
        axes.barh(
            label(row["decoder"]),
            row["speedup"],
            xerr=[[abs(end - row["speedup"])] for end in ends] or None,
            color=PEER_COLOUR if peer else COLOURS[0],
            alpha=0.4 if row["marks"] else 1,
            ecolor=INK,
            capsize=2,
        )
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_xlim(0, top)
    axes.set_xlabel("times as fast as plain decoding")


def survival_draws(rows: Sequence[Row]) -> dict[str, Draw]:
    """Return the plots of survival at the lowest temperature, one for each prompt set."""
    lowest = min(row["temperature"] for row in rows)
    drafting = [row for row in rows if row["temperature"] == lowest and row["survival"]]
    temperature = sampling(lowest)
    return {
        f"Acceptance rate per position (survival): {name}, {temperature}": partial(
            draw_survival, group
        )
        for (name,), group in grouped(drafting, "prompt_set")
    }


def draw_survival(rows: Sequence[Row], axes: Axes) -> None:
    """Draw the share of verifications that accepted the drafts up to a position."""
    for row in rows:
        survival = row["survival"][: 2 * POSITIONS]
        positions = range(1, len(survival) + 1)
        axes.plot(positions, survival, marker=".", label=label(row["decoder"]))
    axes.set_xlabel("position of the draft")
    axes.set_ylabel("share of verifications")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1)
    axes.legend()


def draw_roofline(roofline: Mapping[str, Any], axes: Axes) -> None:
    """Draw the milliseconds of a forward over its number of rows, and the lower bound."""
    rows = roofline["rows"]
    axes.plot(rows, roofline["ms"], ".-", label="measured")
    axes.plot(rows, roofline["roofline_ms"], "--", label="roofline")
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, list(map(str, rows)))
    axes.minorticks_off()
    axes.set_ylim(0)
    axes.set_xlabel(f"rows, after {roofline['context']} tokens")
    axes.set_ylabel("ms")
    axes.legend()
