"""Trees of several sequences as rows of one shape: pure arrays.

    B sequences, q rows each, n columns of cache in use

Drafts come first and probes behind, each filled up to the largest tree's number. A row that fills
up sees the cache and itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infer.tree import Tree, ancestors, depths


@dataclass(frozen=True, slots=True)
class Layout:
    """`ids` and `positions` (B, q) int64; `seen` (B, q, q) bool, who sees whom among the rows."""

    ids: np.ndarray
    positions: np.ndarray
    seen: np.ndarray
    drafts: int  # rows before the probes

    def row(self, tree: Tree, node: int) -> int:
        """The row of a tree's node."""
        return node if node < tree.probes_from else node + self.drafts - tree.probes_from


def extent(trees: Sequence[Tree]) -> tuple[int, int]:
    """The most nodes of any tree that are no probes, and the most that are."""
    return (
        max(tree.probes_from for tree in trees),
        max(len(tree.tokens) - tree.probes_from for tree in trees),
    )


def lay_out(trees: Sequence[Tree], lengths: Sequence[int], *, drafts: int = 1, probes: int = 0) -> Layout:
    """Rows of trees that hang under caches of these lengths; at least so many for drafts and for probes."""
    most = extent(trees)
    drafts, probes = max(drafts, most[0]), max(probes, most[1])
    shape = (len(trees), drafts + probes)
    layout = Layout(
        np.zeros(shape, np.int64),
        np.repeat(np.asarray(lengths, np.int64)[:, None], shape[1], axis=1),
        np.zeros((*shape, shape[1]), bool),
        drafts,
    )
    for b, tree in enumerate(trees):
        if len(tree.tokens) == shape[1]:
            layout.ids[b] = tree.tokens
            layout.positions[b] += depths(tree.parents)
            layout.seen[b] = ancestors(tree.parents)
            continue
        at = [layout.row(tree, node) for node in range(len(tree.tokens))]
        layout.ids[b, at] = tree.tokens
        layout.positions[b, at] += depths(tree.parents)
        np.fill_diagonal(layout.seen[b], True)
        layout.seen[b][np.ix_(at, at)] = ancestors(tree.parents)
    return layout


def mask(layout: Layout, lengths: Sequence[int], columns: int, *, window: int | None = None) -> np.ndarray:
    """(B, 1, q, columns) bool, True where a row attends: to its own sequence's cache, which the rows
    follow, and to the rows it sees; with a window, to no token `window` or more positions before it.
    """
    q = layout.ids.shape[1]
    found = np.zeros((len(lengths), 1, q, columns), bool)
    for b, length in enumerate(lengths):
        found[b, 0, :, :length] = True
        found[b, 0, :, length : length + q] = layout.seen[b]
        if window is not None and length + q > window:
            places = np.concatenate([np.arange(length), layout.positions[b]])
            found[b, 0, :, : length + q] &= places > layout.positions[b][:, None] - window
    return found
