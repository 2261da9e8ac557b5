"""Plots of SDSAT's Figures 3, 4, 6 and 7: acceptance rate and tokens per second by k.

Each plot has one prompt set and a line for each temperature.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes

from conf.console import label
from infer.bench.names import PLAIN, k_of
from infer.bench.statistics import Row, grouped

Lines = Mapping[str, Sequence[tuple[int, float]]]
Draw = Callable[[Axes], None]


def sdsat_draws(rows: Sequence[Row]) -> dict[str, Draw]:
    """Return the plots of part=speed by title, for prompt sets with several k of sdsat.

    In the plot of tokens per second, k=0 is plain decoding.
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
    """Return pairs of k and a figure, by temperature and sorted by k.

    Plain decoding is k=0. It has no acceptance rate.
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
    """Draw a figure over k, a line for each temperature."""
    for name, line in lines.items():
        axes.plot(*zip(*line), marker=".", label=label(name))
    axes.set_xticks(sorted({k for line in lines.values() for k, _ in line}))
    # Without a top the legend has a quarter of the height above the lines.
    axes.set_ylim(0, top or 1.25 * axes.get_ylim()[1])
    axes.set_xlabel("k")
    axes.set_ylabel(title)
    axes.legend(loc="upper left", ncols=3)
