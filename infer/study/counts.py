r"""What became of one step's draft, in numbers. Pure functions of its graph, its tree and the accepted path.

    graph                    tree         accepted y b a c: each the likeliest child, ranks 1 1 1;
                                          c stands behind the merged a, and so the merging succeeded
        y                     y
       / \                   / \
      b   a                 b   a
      |   |                 |   |
      a . c                 a   c
                            |
                            c
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from infer.drafters.outcome import Outcome
from infer.trees.token_graph import Drafts, TokenGraph


@dataclass(frozen=True, slots=True)
class Counts:
    """One step: the `nodes` of its graph without the root, the `levels` that were drafted, the `rows` that the
    draft model was fed, the `tokens` that it emitted, the rank of each accepted draft, and whether one of them
    was a copy.
    """

    nodes: int
    levels: int
    rows: int
    tokens: int
    ranks: tuple[int, ...]
    succeeded: bool

    @classmethod
    def of(cls, outcome: Outcome) -> "Counts":
        """The numbers of a step."""
        return cls(
            len(outcome.graph.tokens) - 1,
            depth(outcome.graph),
            outcome.rows,
            len(outcome.tokens),
            tuple(ranks(outcome.graph, outcome.drafts, outcome.path)),
            outcome.succeeded,
        )


def depth(graph: TokenGraph) -> int:
    """Levels of the graph as it was drafted: of the nodes' own paths, not of those through merged nodes."""
    depths = [0]
    for parent in graph.parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def ranks(graph: TokenGraph, drafts: Drafts, path: Sequence[int]) -> list[int]:
    """Which child of the node before it each accepted draft was: 1 is the likeliest (GSD, Appendix F)."""
    nodes = [drafts.nodes[node] for node in path]
    return [1 + graph.children[before].index(node) for before, node in pairwise(nodes)]
