"""Trees of several sequences as rows of one shape: pure arrays.

    B sequences, q rows each, w columns behind a sequence's committed ones, n columns of cache in use

Drafts come first and probes behind, each filled up to the largest tree's number. A row that fills
up sees the cache and itself. A tree's first nodes may have been fed before, when a draft model grows it
level by level: only the others are rows, and each node's column is behind those of the nodes before it.

    a root and two rivals, fed before, and        column   cache   0  1  2 | 3  4
    a child of each: q = 2, w = 5                 row 0    1 .. 1  1  1  0   1  0
                                                  row 1    1 .. 1  1  0  1   0  1
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infer.trees.tree import Tree, lineage


@dataclass(frozen=True, slots=True)
class Layout:
    """`ids` and `positions` (B, q) int64 of the rows; `seen` (B, q, w) bool, which columns behind the
    committed ones a row sees, and `places` (B, w) int64, the positions of those columns.
    """

    ids: np.ndarray
    positions: np.ndarray
    seen: np.ndarray
    places: np.ndarray
    drafts: int  # rows before the probes
    fed: Sequence[int]  # (B,) nodes that are no rows

    def row(self, b: int, tree: Tree, node: int) -> int:
        """Return the row of a node of tree b that was not fed before."""
        return node - self.fed[b] if node < tree.probes_from else node + self.drafts - tree.probes_from


def extent(trees: Sequence[Tree], fed: Sequence[int] | None = None) -> tuple[int, int]:
    """Return the most drafts and the most probes of any tree, of nodes not fed before."""
    return (
        max(tree.probes_from - before for tree, before in zip(trees, fed or [0] * len(trees))),
        max(len(tree.tokens) - tree.probes_from for tree in trees),
    )


def lay_out(
    trees: Sequence[Tree],
    lengths: Sequence[int],
    *,
    fed: Sequence[int] | None = None,
    drafts: int = 1,
    probes: int = 0,
    width: int = 0,
) -> Layout:
    """Rows of trees that hang under caches of these lengths; at least so many for drafts and for probes,
    and `width` columns. The first `fed[b]` nodes of tree b have their columns already.
    """
    fed = fed or [0] * len(trees)
    most = extent(trees, fed)
    drafts, probes = max(drafts, most[0]), max(probes, most[1])
    q, width = drafts + probes, max(width, max(fed) + drafts + probes)
    layout = Layout(
        np.zeros((len(trees), q), np.int64),
        np.repeat(np.asarray(lengths, np.int64)[:, None], q, axis=1),
        np.zeros((len(trees), q, width), bool),
        np.repeat(np.asarray(lengths, np.int64)[:, None], width, axis=1),
        drafts,
        fed,
    )
    for b, (tree, before) in enumerate(zip(trees, fed)):
        n, (seen, depths) = len(tree.tokens), lineage(tree.parents, before)
        if n - before == q:
            layout.ids[b] = tree.tokens[before:]
            layout.places[b, :n] += depths
            layout.seen[b, :, :n] = seen
        else:
            at = np.array([layout.row(b, tree, node) for node in range(before, n)])
            columns = np.concatenate([np.arange(before), before + at])
            layout.ids[b, at] = tree.tokens[before:]
            layout.places[b, columns] += depths
            layout.seen[b, np.arange(q), before + np.arange(q)] = True
            layout.seen[b][np.ix_(at, columns)] = seen
        layout.positions[b] = layout.places[b, before : before + q]
    return layout


def mask(layout: Layout, lengths: Sequence[int], columns: int, *, window: int | None = None) -> np.ndarray:
    """(B, 1, q, columns) bool, True where a row attends: to its own sequence's cache, which the tree's
    columns follow, and to those it sees; with a window, to no token `window` or more positions before it.
    """
    q, width = layout.seen.shape[1:]
    result = np.zeros((len(lengths), 1, q, columns), bool)
    for b, length in enumerate(lengths):
        w = min(width, columns - length)
        result[b, 0, :, :length] = True
        result[b, 0, :, length : length + w] = layout.seen[b, :, :w]
    if window is not None and max(lengths) + width > window:
        at = key_positions(layout, lengths, columns)
        result &= (at[:, None] > layout.positions[..., None] - window)[:, None]
    return result


def key_positions(layout: Layout, lengths: Sequence[int], columns: int) -> np.ndarray:
    """(B, columns) int64, the position of the token in each column: in the cache the column itself, in the
    tree's columns its node's. What lies behind those is attended by no row.
    """
    positions = np.tile(np.arange(columns), (len(lengths), 1))
    for b, length in enumerate(lengths):
        w = min(layout.places.shape[1], columns - length)
        positions[b, length : length + w] = layout.places[b, :w]
    return positions
