"""The drafts of one window as a graph: a lattice.

The candidates for place j are predicted without regard to those for other places, so each may
follow each. As a graph the first candidate for a place has the next place's candidates as children,
and its rivals are merged into it.

    place 1   place 2        chances 0.6, 0.3 and 0.7, 0.2      root
    a .6      c .7           unrolled in order of the joint     |-- a .6
    b .3      d .2           chance: a .6, ac .42, b .3,        |   |-- c .42
                             bc .21, ad .12, bd .06             |   `-- d .12
                                                                `-- b .3 ...

With chances by rank alone, the same at every step, the tree is the usual one of a fixed shape.
"""

from collections.abc import Sequence

from infer.trees.token_graph import Drafts, TokenGraph, unroll

# How often the first candidate for a place is right where all before it are, and how that falls with the
# rank r: as r to the power of -FALL. Fitted to the pooled first five places of the demo model on its held-out
# text: ranks 1 to 6 were right in .53 .15 .08 .05 .03 .03 of the cases, greedy, and in .38 .14 .07 .05 .03 .02,
# sampled at temperature 1.
FIRST, FALL = 0.5, 1.75


def by_rank(ids: Sequence[Sequence[int]]) -> list[list[float]]:
    """Chances of the candidates for each place by their ranks alone: of a tree that is always the same."""
    return [[FIRST / rank**FALL for rank in range(1, len(row) + 1)] for row in ids]


def lattice(root: int, ids: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]) -> TokenGraph:
    """Candidates `ids[j][r]` for each place behind the root; `chances[j]` are those of the candidates for
    place j where all before them are right, falling.
    """
    graph, first = TokenGraph([root]), 0
    for place, row in zip(ids, chances):
        nodes = [graph.add(first, token, chance) for token, chance in zip(place, row)]
        for rival in nodes[1:]:
            graph.merge(rival, nodes[0])
        first = nodes[0]
    return graph


def grow(
    root: int, ids: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], prices: Sequence[float]
) -> Drafts:
    """The likeliest paths through a lattice, while node n's chance is above `prices[n - 1]`."""
    return unroll(lattice(root, ids, chances), prices, depth=len(ids))
