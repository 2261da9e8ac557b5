"""Plots of SDSAT's Figures 3, 4, 6 and 7: acceptance and tokens per second by k, as SVG.

Each function returns one panel of one prompt set, a line for each temperature.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from conf.console import label
from infer.bench.runs import PLAIN
from infer.bench.speed import k_of

Row = Mapping[str, Any]


def sdsat_plots(rows: Sequence[Row]) -> dict[str, str]:
    """Return the plots of a speed part by title; none unless sdsat has more than one k."""
    plots = {}
    for name in dict.fromkeys(row["prompt_set"] for row in rows):
        group = [row for row in rows if row["prompt_set"] == name]
        if len({k_of(row["decoder"]) for row in group} - {None}) > 1:
            plots[f"{name}: acceptance rate by k"] = acceptance_by_k(group)
            plots[f"{name}: tokens per second by k"] = tokens_per_second_by_k(group)
    return plots


def acceptance_by_k(rows: Sequence[Row]) -> str:
    """Return the acceptance rate of sdsat by k."""
    return line_plot(points(rows, "acceptance_rate"), "acceptance rate", top=1.0)


def tokens_per_second_by_k(rows: Sequence[Row]) -> str:
    """Return the tokens per second of sdsat by k; k=0 is plain decoding."""
    return line_plot(points(rows, "output_tokens_per_second"), "tokens/s")


def points(rows: Sequence[Row], figure: str) -> dict[str, list[tuple[int, float]]]:
    """Return the pairs of k and a figure by temperature, sorted by k.

    Plain decoding, which accepts nothing, is k=0 of figures other than the acceptance rate.
    """
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        k = 0 if row["decoder"] == PLAIN else k_of(row["decoder"])
        if k is not None and row[figure] is not None:
            line = lines.setdefault(f"T={row['temperature']:g}", [])
            line.append((k, row[figure]))
    return {name: sorted(line) for name, line in lines.items()}


def line_plot(
    lines: Mapping[str, Sequence[tuple[int, float]]],
    title: str,
    *,
    top: float | None = None,
) -> str:
    """Return a plot over k as an SVG element. Equal lines give equal text."""
    figure = Figure(figsize=(4.2, 3), layout="constrained")
    axis = figure.subplots()
    for name, line in lines.items():
        axis.plot(*zip(*line), marker=".", label=label(name))
    axis.set_xticks(sorted({k for line in lines.values() for k, _ in line}))
    axis.set_ylim(0, top)
    axis.set_xlabel("k", fontsize=8)
    axis.set_ylabel(title, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=8)
    file = io.StringIO()
    with rc_context({"svg.hashsalt": title}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
