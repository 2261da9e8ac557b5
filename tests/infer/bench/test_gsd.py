"""GSD's figures, from the counts of chosen drafts."""

import pytest

from infer.bench.gsd import DraftedText, StepCounts, figures
from infer.trees.token_graph import Outcome, TokenGraph, unroll

Y, A, B, C, D = range(5)


def tree_of(*parents_and_tokens: tuple[int, int]) -> TokenGraph:
    graph = TokenGraph([Y])
    for parent, token in parents_and_tokens:
        graph.add(parent, token, 0.5)
    return graph


def merged_graph() -> TokenGraph:
    """Return the graph drawn in gsd.py: b's child a is merged into the root's."""
    graph = tree_of((0, B), (0, A), (1, A), (2, C))
    graph.merge(3, 2)
    return graph


def accept(graph: TokenGraph, *nodes: int) -> Outcome:
    """Return the outcome of accepting these nodes of the graph, one behind the other."""
    drafts = unroll(graph, [0.0] * 10, depth=10)
    path = [0]
    for node in nodes:
        behind = (at for at, parent in enumerate(drafts.parents) if parent == path[-1])
        path.append(next(at for at in behind if drafts.nodes[at] == node))
    return Outcome(
        graph, drafts, path, [*(drafts.tokens[at] for at in path[1:]), D], rows=4
    )


@pytest.mark.parametrize(
    ("nodes", "tokens", "ranks", "succeeded"),
    [
        ((), 1, (), False),
        ((2, 4), 3, (2, 1), False),
        ((1, 3), 3, (1, 1), False),
        ((1, 3, 4), 4, (1, 1, 1), True),
    ],
)
def test_a_step_counts_ranks_and_merges(
    nodes: tuple[int, ...], tokens: int, ranks: tuple[int, ...], succeeded: bool
) -> None:
    counts = StepCounts.of(accept(merged_graph(), *nodes))
    assert counts == StepCounts(3, 2, tokens, ranks, succeeded)


def test_figures_are_those_of_the_drafts() -> None:
    """Acceptance is by level drafted, averaged over texts, as the authors count; two steps drafted nothing."""
    graph = merged_graph()
    first = DraftedText([1] * 8, 3, 5, [accept(graph, 1, 3, 4), accept(graph, 2)])
    second = DraftedText([1] * 4, 4, 1, [accept(graph, 1)])
    row = figures([first, second])
    assert row["acceptance_rate"] == ((3 + 1) / 4 + 1 / 2) / 2
    assert row["drafted_share"] == 6 / 12 and row["mean_acceptance_length"] == 1 + 5 / 3
    assert row["levels"] == 2 and row["graph_success"] == pytest.approx(1 / 3)
    assert row["drafted_per_token"] == 9 / (
        4 + 2 + 2 + 2
    )  # merged nodes are not drafted anew
    assert row["rank_shares"] == [4 / 5, 1 / 5, 0, 0]
    assert figures([DraftedText([1, 2], 2, 0, [])]) == {}
