"""GSD's figures, from the counts of chosen drafts."""

import pytest

from infer.bench.gsd import DraftedText, figures
from infer.trees.token_graph import Outcome, TokenGraph, unroll

Y, A, B, C, D = range(5)


def accept(*nodes: int) -> Outcome:
    """Return the outcome of accepting these nodes, one behind the other.

    The graph is drawn in gsd.py: b's child a is merged into the root's.
    """
    graph = TokenGraph([Y])
    for parent, token in ((0, B), (0, A), (1, A), (2, C)):
        graph.add(parent, token, 0.5)
    graph.merge(3, 2)
    drafts = unroll(graph, [0.0] * 10, depth=10)
    path = [0]
    for node in nodes:
        behind = (at for at, parent in enumerate(drafts.parents) if parent == path[-1])
        path.append(next(at for at in behind if drafts.nodes[at] == node))
    tokens = [drafts.tokens[at] for at in path[1:]]
    return Outcome(graph, drafts, path, [*tokens, D], rows=4)


def test_figures_are_those_of_the_drafts() -> None:
    """Acceptance is by level drafted, averaged over texts, as the authors count.

    Two steps drafted nothing. Merged nodes are not drafted anew.
    """
    first = DraftedText([1] * 8, 3, 5, [accept(1, 3, 4), accept(2)])
    second = DraftedText([1] * 4, 4, 1, [accept(1)])
    row = figures([first, second])
    assert row["acceptance_rate"] == ((3 + 1) / 4 + 1 / 2) / 2
    assert row["drafted_share"] == 6 / 12 and row["mean_acceptance_length"] == 1 + 5 / 3
    assert row["levels"] == 2 and row["graph_success"] == pytest.approx(1 / 3)
    assert row["drafted_per_token"] == 9 / (4 + 2 + 2 + 2)
    assert row["rank_shares"] == [4 / 5, 1 / 5, 0, 0]
    assert figures([DraftedText([1, 2], 2, 0, [])]) == {}
