"""Plots of GSD's Figures 3, 5, 7 and 8 from the rows of part=gsd."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes

from infer.bench.statistics import Row, grouped

PARAMETERS = {"k": "k", "tau": "τ", "theta_prob": "θ_prob", "theta_sib": "θ_sib"}
Draw = Callable[[Axes], None]


def gsd_draws(rows: Sequence[Row]) -> dict[str, Draw]:
    """Return the plots by title, for every prompt set and figure with data."""
    return {
        f"{title}, {prompt_set}": draw
        for (prompt_set,), group in grouped(rows, "prompt_set")
        for title, draw in draws_of(group).items()
    }


def draws_of(rows: Sequence[Row]) -> dict[str, Draw]:
    """Return the plots of one prompt set by title."""
    plots: dict[str, Draw] = {}
    greedy = {
        row["setting"].removeprefix("greedy ").upper(): row
        for row in rows
        if row["part"] == "methods" and row["setting"].startswith("greedy ")
    }
    if greedy:
        shares = {method: row["rank_shares"] for method, row in greedy.items()}
        trees = greedy["TSD"]["recurring"]
        plots["Tokens in recurring n-grams (Figure 3)"] = partial(
            draw_recurring, shares=trees
        )
        plots["Accepted drafts by rank (Figure 7)"] = partial(draw_ranks, shares=shares)
    for name, symbol in PARAMETERS.items():
        if lines := ablation_of(rows, name):
            plots[f"Ablation of {symbol} (Figure 5)"] = partial(
                draw_ablation, lines=lines, symbol=symbol
            )
    if lines := ablation_of(rows, "theta_sib"):
        plots["Accepted drafts by rank and θ_sib (Figure 8)"] = partial(
            draw_ranks_by_theta, by_value=lines["gsd"]
        )
    return plots


def ablation_of(rows: Sequence[Row], name: str) -> dict[str, dict[float, Row]]:
    """Return the ablation rows of a setting, by method and by the setting's value."""
    lines: dict[str, dict[float, Row]] = {}
    for row in rows:
        method, _, changed = row["setting"].partition(" ")
        changed_name, _, value = changed.partition("=")
        if row["part"] == "ablation" and changed_name == name:
            lines.setdefault(method, {})[float(value)] = row
    return lines


def draw_recurring(axes: Axes, shares: Sequence[float]) -> None:
    """Draw the share of a tree's tokens that are in an n-gram of two branches, over n."""
    axes.bar(range(1, 1 + len(shares)), [100 * share for share in shares])
    axes.set_xlabel("n, the length of the n-gram")
    axes.set_ylabel("tokens, %")
    axes.set_ylim(bottom=0)


def draw_ranks(axes: Axes, shares: Mapping[str, Sequence[float]]) -> None:
    """Draw each method's accepted drafts by their rank among siblings."""
    width = 0.8 / len(shares)
    for at, (method, values) in enumerate(shares.items()):
        positions = [
            rank + (at - (len(shares) - 1) / 2) * width for rank in range(len(values))
        ]
        axes.bar(positions, [100 * value for value in values], width, label=method)
    ranks = range(max(map(len, shares.values())))
    axes.set_xticks(ranks, [f"rank {1 + rank}" for rank in ranks])
    axes.set_ylabel("accepted drafts, %")
    axes.legend()


def draw_ablation(
    axes: Axes, lines: Mapping[str, Mapping[float, Row]], symbol: str
) -> None:
    """Draw acceptance rate (left, lines) and drafted tokens (right, dashed) over a setting."""
    right = axes.twinx()
    for at, (method, by_value) in enumerate(lines.items()):
        style: dict[str, Any] = {"color": f"C{at}", "label": method.upper()}
        values = sorted(by_value)
        rates = [by_value[value]["acceptance_rate"] for value in values]
        drafted = [by_value[value]["drafted_tokens"] for value in values]
        axes.plot(values, rates, "o-", **style)
        right.plot(values, drafted, "s--", **style)
    axes.set_xticks(sorted(set().union(*lines.values())))
    axes.set_xlabel(symbol)
    axes.set_ylabel("acceptance rate (—)")
    right.set_ylabel("drafted tokens (- -)")
    right.set_ylim(0)
    axes.legend()


def draw_ranks_by_theta(axes: Axes, by_value: Mapping[float, Row]) -> None:
    """Draw the accepted drafts of each rank over θ_sib."""
    values = sorted(by_value)
    for rank in range(len(by_value[values[0]]["rank_shares"])):
        shares = [100 * by_value[value]["rank_shares"][rank] for value in values]
        axes.plot(values, shares, "o-", label=f"rank {1 + rank}")
    axes.set_xlabel("θ_sib")
    axes.set_ylabel("accepted drafts, %")
    axes.legend()
