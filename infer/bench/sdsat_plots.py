"""Plots of SDSAT's Figures 3, 4, 6 and 7: acceptance and tokens per second by k.

Each has one panel of one prompt set, a line for each temperature.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes

from conf.console import label
from infer.bench.names import PLAIN, k_of
from infer.bench.statistics import grouped

Row = Mapping[str, Any]
Lines = Mapping[str, Sequence[tuple[int, float]]]
Draw = Callable[[Axes], None]


def sdsat_draws(rows: Sequence[Row]) -> dict[str, Draw]:
    """Return the plots of a speed part by title; none unless sdsat has more than one k.

    k=0 of the tokens per second is plain decoding.
    """
    draws: dict[str, Draw] = {}
    for (name,), group in grouped(rows, "prompt_set"):
        if len({k_of(row["decoder"]) for row in group} - {None}) > 1:
            rates = points(group, "acceptance_rate")
            speeds = points(group, "output_tokens_per_second")
            draws |= {
                f"Acceptance rate by k: {name}": partial(
                    draw_by_k, rates, "acceptance rate", top=1.0
                ),
                f"Tokens per second by k: {name}": partial(
                    draw_by_k, speeds, "tokens/s"
                ),
            }
    return draws


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


def draw_by_k(
    lines: Lines, title: str, axes: Axes, *, top: float | None = None
) -> None:
    """Draw a figure over k."""
    for name, line in lines.items():
        axes.plot(*zip(*line), marker=".", label=label(name))
    axes.set_xticks(sorted({k for line in lines.values() for k, _ in line}))
    axes.set_ylim(0, top)
    axes.set_xlabel("k")
    axes.set_ylabel(title)
    axes.legend()
