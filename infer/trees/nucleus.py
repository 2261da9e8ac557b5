"""The published trees of drafts (SDSAT §3.4.2): a fixed shape, the same at every step.

The candidates for a place of a window are ranked, and the shape says which ranks follow which.
"""

from collections.abc import Callable
from functools import lru_cache

from infer.trees.token_graph import Drafts, TokenGraph

# The number of nodes of each level, by depth of the tree (tree_choice in the authors' code).
# The trees have 28 to 76 nodes.
LEVELS = {
    5: (4, 8, 8, 5, 3),
    7: (4, 8, 8, 6, 5, 3, 2),
    9: (4, 8, 8, 6, 6, 5, 4, 3, 2),
    11: (4, 8, 8, 8, 6, 6, 6, 5, 4, 3, 2),
    13: (4, 8, 8, 8, 8, 8, 6, 6, 6, 5, 4, 3, 2),
}
# The number of children of each node of the level above, by the number of nodes of a level.
CHILDREN = {8: (3, 2, 2, 1), 6: (3, 2, 1), 5: (3, 2), 4: (3, 1), 3: (3,), 2: (2,)}
DEEPEST = max(LEVELS)  # the number of places of the deepest tree
RANKS = 4  # the maximum number of candidates for a place


@lru_cache
def nucleus_shape(depth: int) -> tuple[tuple[int, int], ...]:
    """Return (parent, rank) of every node after the root of the authors' tree.

    A depth without a published tree gets the first levels of the next deeper tree. The ranks
    of each level at depth 5, with siblings in brackets:

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
    """Return the authors' tree over a graph (SDSAT §3.4.2).

    `expand` adds a node's children to the graph.
    """
    drafts = Drafts.root(graph)
    nodes: list[int | None] = [0]  # the node of `drafts` for each node of the shape
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
