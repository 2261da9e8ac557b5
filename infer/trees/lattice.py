"""The drafts of one window as a graph: a lattice.

The candidates for place j are predicted without regard to those for other places, so each may
follow each. As a graph the first candidate for a place has the next place's candidates as children,
and its rivals are merged into it.

    place 1   place 2        chances 0.6, 0.3 and 0.7, 0.2      root
    a .6      c .7           unrolled in order of the joint     |-- a .6
    b .3      d .2           chance: a .6, ac .42, b .3,        |   |-- c .42
                             bc .21, ad .12, bd .06             |   `-- d .12
                                                                `-- b .3 ...

The published trees (SDSAT §3.4.2) are the other shape: `nucleus_tree` is the same at every step.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

from infer.trees.token_graph import Drafts, TokenGraph

# Nodes by level of the authors' trees, by depth: 28, 36, 46, 60 and 76 nodes (their tree_choice), and how the
# nodes of a level are divided: the first node above it has the first number of children, and so on.
LEVELS = {
    5: (4, 8, 8, 5, 3),
    7: (4, 8, 8, 6, 5, 3, 2),
    9: (4, 8, 8, 6, 6, 5, 4, 3, 2),
    11: (4, 8, 8, 8, 6, 6, 6, 5, 4, 3, 2),
    13: (4, 8, 8, 8, 8, 8, 6, 6, 6, 5, 4, 3, 2),
}
CHILDREN = {8: (3, 2, 2, 1), 6: (3, 2, 1), 5: (3, 2), 4: (3, 1), 3: (3,), 2: (2,)}
# places of the deepest tree; candidates that a tree has for a place, at most
DEEPEST = max(LEVELS)
RANKS = 4


def lattice(
    root: int, ids: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]
) -> TokenGraph:
    """Build a tree of candidates `ids[j][r]` for each place behind the root; `chances[j]` are those of the
    candidates for place j where all before them are right, falling.
    """
    graph = TokenGraph([root])
    first = 0
    for place, row in zip(ids, chances):
        nodes = [graph.add(first, token, chance) for token, chance in zip(place, row)]
        for rival in nodes[1:]:
            graph.merge(rival, nodes[0])
        first = nodes[0]
    return graph


@lru_cache
def nucleus_shape(depth: int) -> tuple[tuple[int, int], ...]:
    """Return (parent, rank) of every node behind the root of the authors' tree of `depth` levels, 1 to 13.

    A depth between two of theirs has the first levels of the deeper tree. Depth 5, the ranks of a level from
    left to right, nodes with the same parent in brackets:

        level 1   (0 1 2 3)
        level 2   (0 1 2)(0 1)(0 1)(0)       under the four nodes of level 1
        level 3   (0 1 2)(0 1)(0 1)(0)       under the first four of level 2
        level 4   (0 1 2)(0 1)               under the first two of level 3
        level 5   (0 1 2)                    under the first one of level 4
    """
    sizes = next(
        sizes for deepest, sizes in sorted(LEVELS.items()) if depth <= deepest
    )[:depth]
    shape: list[tuple[int, int]] = []
    level = [0]
    for size in sizes:
        children = CHILDREN[size] if shape else (size,)
        first = 1 + len(shape)
        shape += [
            (parent, rank)
            for parent, count in zip(level, children)
            for rank in range(count)
        ]
        level = list(range(first, 1 + len(shape)))
    return tuple(shape)


def nucleus_tree(
    graph: TokenGraph, depth: int, expand: Callable[[int], None]
) -> Drafts:
    """Return the authors' tree over a graph (SDSAT §3.4.2); `expand` hangs the candidates behind a node."""
    drafts = Drafts([graph.tokens[0]], [-1], [0], [1.0], [0])
    nodes: list[int | None] = [0]  # of the drafts, by node of the shape
    for above, rank in nucleus_shape(depth) if depth else ():
        parent = nodes[above]
        if parent is None:
            nodes.append(None)
            continue
        node = drafts.nodes[parent]
        if not rank:
            expand(node)
        if rank >= len(graph.children[node]):
            nodes.append(None)
            continue
        nodes.append(len(drafts.tokens))
        child = graph.children[node][rank]
        drafts.hang(graph, child, parent, drafts.chances[parent] * graph.chances[child])
    return drafts
