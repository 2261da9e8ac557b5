"""A draft: a tree of tokens hung under the last emitted token. Pure data.

Node 0 is the last emitted token, not yet in the cache. A node attends to the cache, to its
ancestors and to itself; its position is the cache's length plus its depth. Probe nodes hold
adaptive tokens: attended like any other, never accepted, never committed. They stand behind all
other nodes, one chain of them under each node of `probed`.

    a root, two rival drafts,        node     0  1  2  3  4        0
    and two probes under node 2:     token    y  a  b  m  m       / \
                                     parent   -  0  0  2  3      1   2
    probes_from = 3                  0 attends 1 0 0 0 0             |
    probed = (2,)                    1 attends 1 1 0 0 0             3
                                     2 attends 1 0 1 0 0             |
                                     3 attends 1 0 1 1 0             4
                                     4 attends 1 0 1 1 1

Trees of several sequences as rows of one shape: pure arrays.

    B sequences, q rows each, w columns behind a sequence's committed ones, n columns of cache in use

Drafts come first and probes behind, each filled up to the largest tree's number. A row that fills
up sees the cache and itself. A tree's first nodes may have been fed before, when a draft model grows it
level by level: only the others are rows, and each node's column is behind those of the nodes before it.

    a root and two rivals, fed before, and        column   cache   0  1  2 | 3  4
    a child of each: q = 2, w = 5                 row 0    1 .. 1  1  1  0   1  0
                                                  row 1    1 .. 1  1  0  1   0  1
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from torch import Tensor

Rows = np.ndarray
Fed: TypeAlias = (
    Sequence[int] | None
)  # by tree, the nodes whose columns are in the cache; None: none has any
SMALL = 128  # nodes of a tree that is worth keeping


@dataclass(frozen=True, slots=True)
class Tree:
    """`tokens[i]` hangs under `parents[i]`, a smaller index; the root's parent is -1.

    Nodes from `probes_from` on are probes: chains of equal length, in the order of `probed`.
    A tree with `drawn` is verified by ratio: it holds the distribution (V,) that each node's children
    were drawn from, in their order here, for every node that has any (see pick.py).
    `shared` are the drafts that were drawn behind another node than they hang under (see token_graph.py).
    `sources` names the source of each draft, "" the root's (drafters/places.py); empty where one model drafts.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probes_from: int
    probed: tuple[int, ...] = ()
    drawn: Mapping[int, Tensor] | None = field(default=None, compare=False)
    shared: frozenset[int] = frozenset()
    sources: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def chain(
        cls, root: int, drafts: Sequence[int] = (), *, probes: Sequence[int] = ()
    ) -> "Tree":
        """Return a root, drafts one under the other, and probes under the last of them."""
        tokens = (root, *drafts)
        tree = cls(tokens, tuple(range(-1, len(tokens) - 1)), len(tokens))
        return tree.probe((len(drafts),), probes) if probes else tree

    def probe(self, under: Sequence[int], probes: Sequence[int]) -> "Tree":
        """Return the same drafts with a chain of probes under each of these nodes."""
        tokens = list(self.tokens)
        parents = list(self.parents)
        for node in under:
            tokens += probes
            parents += [node, *range(len(parents), len(parents) + len(probes) - 1)]
        return Tree(
            tuple(tokens),
            tuple(parents),
            self.probes_from,
            tuple(under),
            self.drawn,
            self.shared,
            self.sources,
        )

    @property
    def drafted(self) -> int:
        """Nodes that may be accepted."""
        return self.probes_from - 1

    @property
    def depth(self) -> int:
        """Of the deepest draft: so many tokens may be accepted."""
        return int(lineage(self.parents)[1][: self.probes_from].max())

    def children(self, node: int) -> list[int]:
        """Return the drafts under a node."""
        return [
            child
            for child in range(node + 1, self.probes_from)
            if self.parents[child] == node
        ]

    def probes_of(self, node: int) -> range:
        """Return the probes under a node; empty where it has none."""
        if node not in self.probed:
            return range(0)
        k = (len(self.tokens) - self.probes_from) // len(self.probed)
        first = self.probes_from + k * self.probed.index(node)
        return range(first, first + k)

    def walk(self, choose: Callable[[int], int]) -> tuple[list[int], int]:
        """Return the accepted path from the root, and the token that follows it.

        `choose(i)` is the token that the model puts after node i; it is asked for the nodes of the
        path alone, in their order. From each node the path goes on to the child that holds its choice.
        """
        path = [0]
        choice = choose(0)
        for node in range(1, self.probes_from):
            if self.tokens[node] == choice and self.parents[node] == path[-1]:
                path.append(node)
                choice = choose(node)
        return path, choice


def lineage(parents: tuple[int, ...], first: int = 0) -> tuple[Rows, Rows]:
    """Return (n - first, n) bool, the row of node i, from `first` on, True at i and at every ancestor of i;
    and (n,) int64, the distance of each node from the root.
    """
    # A tree that grows is another one each time; those that are verified are often of the same shape.
    return (
        _lineage(parents, first)
        if first or len(parents) > SMALL
        else _cached(parents, 0)
    )


def _lineage(parents: tuple[int, ...], first: int) -> tuple[Rows, Rows]:
    n = len(parents)
    if parents == tuple(range(-1, n - 1)):
        return np.tri(n - first, n, first, dtype=bool), np.arange(n)
    depths = [0] * n
    rows: list[int] = []
    columns: list[int] = []
    for node in range(1, n):
        depths[node] = depths[parents[node]] + 1
    for node in range(first, n):
        rows += [node - first] * (depths[node] + 1)
        while node >= 0:
            columns.append(node)
            node = parents[node]
    seen = np.zeros((n - first, n), bool)
    seen[rows, columns] = True
    return seen, np.array(depths)


_cached = lru_cache(maxsize=256)(_lineage)


@dataclass(frozen=True, slots=True)
class FlatTrees:
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
        return (
            node - self.fed[b]
            if node < tree.probes_from
            else node + self.drafts - tree.probes_from
        )


def extent(trees: Sequence[Tree], fed: Fed = None) -> tuple[int, int]:
    """Return the most drafts and the most probes of any tree, of nodes not fed before."""
    return (
        max(
            tree.probes_from - before
            for tree, before in zip(trees, fed or [0] * len(trees))
        ),
        max(len(tree.tokens) - tree.probes_from for tree in trees),
    )


def flatten(
    trees: Sequence[Tree],
    lengths: Sequence[int],
    *,
    fed: Fed = None,
    drafts: int = 1,
    probes: int = 0,
    width: int = 0,
) -> FlatTrees:
    """Flatten trees to rows that hang under caches of these lengths; at least so many for drafts and for
    probes, and `width` columns. The first `fed[b]` nodes of tree b have their columns already.
    """
    fed = fed or [0] * len(trees)
    most = extent(trees, fed)
    drafts = max(drafts, most[0])
    probes = max(probes, most[1])
    q = drafts + probes
    width = max(width, max(fed) + drafts + probes)
    flat = FlatTrees(
        np.zeros((len(trees), q), np.int64),
        np.repeat(np.asarray(lengths, np.int64)[:, None], q, axis=1),
        np.zeros((len(trees), q, width), bool),
        np.repeat(np.asarray(lengths, np.int64)[:, None], width, axis=1),
        drafts,
        fed,
    )
    for b, (tree, before) in enumerate(zip(trees, fed)):
        n = len(tree.tokens)
        (seen, depths) = lineage(tree.parents, before)
        if n - before == q:
            flat.ids[b] = tree.tokens[before:]
            flat.places[b, :n] += depths
            flat.seen[b, :, :n] = seen
        else:
            at = np.array([flat.row(b, tree, node) for node in range(before, n)])
            columns = np.concatenate([np.arange(before), before + at])
            flat.ids[b, at] = tree.tokens[before:]
            flat.places[b, columns] += depths
            flat.seen[b, np.arange(q), before + np.arange(q)] = True
            flat.seen[b][np.ix_(at, columns)] = seen
        flat.positions[b] = flat.places[b, before : before + q]
    return flat


def mask(
    flat: FlatTrees, lengths: Sequence[int], columns: int, *, window: int | None = None
) -> np.ndarray:
    """Return (B, 1, q, columns) bool, True where a row attends: to its own sequence's cache, which the tree's
    columns follow, and to those it sees; with a window, to no token `window` or more positions before it.
    """
    q, width = flat.seen.shape[1:]
    result = np.zeros((len(lengths), 1, q, columns), bool)
    for b, length in enumerate(lengths):
        w = min(width, columns - length)
        result[b, 0, :, :length] = True
        result[b, 0, :, length : length + w] = flat.seen[b, :, :w]
    if window is not None and max(lengths) + width > window:
        at = key_positions(flat, lengths, columns)
        result &= (at[:, None] > flat.positions[..., None] - window)[:, None]
    return result


def key_positions(flat: FlatTrees, lengths: Sequence[int], columns: int) -> np.ndarray:
    """Return (B, columns) int64, the position of the token in each column: in the cache the column itself, in
    the tree's columns its node's. What lies behind those is attended by no row.
    """
    positions = np.tile(np.arange(columns), (len(lengths), 1))
    for b, length in enumerate(lengths):
        w = min(flat.places.shape[1], columns - length)
        positions[b, length : length + w] = flat.places[b, :w]
    return positions
