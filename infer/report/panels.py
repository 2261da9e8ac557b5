"""Figures of panels that share an axis and a legend."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from conf.characters import label
from infer.report.rows import Row, groups

WIDE = 10.5  # inches of a figure
HIGH = 3.4  # of a panel
COLUMNS = 3  # panels beside each other


def by_set(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by prompt set, and by dtype where there are several."""
    by_dtype = groups(rows, "dtype")
    return {
        f"{name}, {dtype}" if len(by_dtype) > 1 else name: mine
        for (dtype,), own in by_dtype.items()
        for (name,), mine in groups(own, "prompt_set").items()
    }


def sets(rows: Sequence[Row]) -> int:
    """Panels beside each other: a dtype's prompt sets, as far as there is room."""
    return min(COLUMNS, len({row["prompt_set"] for row in rows}))


def panels(contents: Mapping[str, Any], *, columns: int) -> tuple[Figure, list[tuple[Axes, Any]]]:
    """A figure with a panel for each content, under its name."""
    columns = min(columns, len(contents))
    rows = -(-len(contents) // columns)
    figure = Figure(figsize=(WIDE, HIGH * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
    panels = []
    for name, content in contents.items():
        axis = next(axes)
        axis.set_title(label(name.replace("_", " ")), fontsize="medium")
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        panels.append((axis, content))
    for axis in axes:
        axis.set_visible(False)
    return figure, panels


def finish(figure: Figure, panels: Sequence[tuple[Axes, Any]], *, ylabel: str, legend: int = 4) -> Figure:
    """The axis's limit and name, and a legend in so many columns. Once every panel is drawn: they share the
    axis, and a limit set earlier would cut the later ones.
    """
    panels[0][0].set_ylim(bottom=0)
    figure.supylabel(ylabel, fontsize="medium")
    for axis, _ in panels:
        axis.tick_params(labelleft=True)
    entries = {name: handle for axis, _ in panels for handle, name in zip(*axis.get_legend_handles_labels())}
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower center",
        ncols=legend,
        frameon=False,
        fontsize="small",
    )
    return figure


def coolest(rows: Sequence[Row]) -> list[Row]:
    """Those of the lowest temperature."""
    lowest = min((row["temperature"] for row in rows), default=0)
    return [row for row in rows if row["temperature"] == lowest]
