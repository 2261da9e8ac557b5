"""A draft as a tree of tokens under the last emitted token. Pure data.

Node 0 is the last emitted token, which is not in the cache yet. A node attends to the
cache, to its ancestors and to itself. Its position is the cache's length plus its depth.
Probe nodes hold adaptive tokens: other nodes never attend to them, and they are never
accepted or committed. They come after all other nodes, one chain of them under each
node of `probed`.

    a root, two rival drafts,        node     0  1  2  3  4        0
    and two probes under node 2:     token    y  a  b  m  m       / \
                                     parent   -  0  0  2  3      1   2
    probes_from = 3                  0 attends 1 0 0 0 0             |
    probed = (2,)                    1 attends 1 1 0 0 0             3
                                     2 attends 1 0 1 0 0             |
                                     3 attends 1 0 1 1 0             4
                                     4 attends 1 0 1 1 1

The trees of a batch become rows of one shape:

    B sequences, q rows each, w columns after the committed ones, n columns in use

The rows of drafts come first, then the rows of probes. Both are padded to the largest
number of any tree in the batch. A padding row attends to the cache and to itself. A draft
model grows a tree level by level: the first `fed` nodes are already in the cache, and
only the new nodes are rows.

    a root and two rivals, already fed, and       column   cache   0  1  2 | 3  4
    a child of each: q = 2, w = 5                 row 0    1 .. 1  1  1  0   1  0
                                                  row 1    1 .. 1  1  0  1   0  1
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
#: The number of nodes of each tree that are already in the cache; None: 0 for every tree.
Fed: TypeAlias = Sequence[int] | None
CACHED_NODES = 128  # larger trees are not worth caching


@dataclass(frozen=True, slots=True)
class Tree:
    """A draft of one sequence, with its probes.

    The parent of `tokens[i]` is `parents[i]`, a smaller index; the root's parent is -1.
    Nodes from `probes_from` on are probes: chains of equal length, in the order of
    `probed`. A tree with `drawn` is verified by ratio: `drawn` maps each node with
    children to the (V,) distribution that the children were drawn from, in their order
    (pick.py). `shared` are the drafts that the draft model computed under another node
    than their parent (token_graph.py). `sources` names the source of each draft, "" for
    the root (drafters/candidates.py); it is empty if a draft model drafts.
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
        """Return a root, a chain of drafts, and probes under the last node."""
        tokens = (root, *drafts)
        tree = cls(tokens, tuple(range(-1, len(tokens) - 1)), len(tokens))
        return tree.probe((len(drafts),), probes) if probes else tree

    def probe(self, under: Sequence[int], probes: Sequence[int]) -> "Tree":
        """Return the same drafts with a chain of probes under each node of `under`."""
        tokens = list(self.tokens)
        parents = list(self.parents)
        for node in under:
            tokens += probes
            parents += [node, *range(len(parents), len(parents) + len(probes) - 1)]
        return replace(
            self, tokens=tuple(tokens), parents=tuple(parents), probed=tuple(under)
        )

    def unprobed(self) -> "Tree":
        """Return the same drafts without probes (adaptive tokens)."""
        end = self.probes_from
        return replace(
            self, tokens=self.tokens[:end], parents=self.parents[:end], probed=()
        )

    @property
    def drafted(self) -> int:
        """The number of drafts: nodes other than the root and the probes."""
        return self.probes_from - 1

    @property
    def depth(self) -> int:
        """The depth of the deepest draft, the maximum number of accepted tokens."""
        return int(lineage(self.parents)[1][: self.probes_from].max())

    def children(self, node: int) -> list[int]:
        """Return the drafts that directly follow a node."""
        return [
            child
            for child in range(node + 1, self.probes_from)
            if self.parents[child] == node
        ]

    def probes_of(self, node: int) -> range:
        """Return the indices of the probes under a node; empty without probes."""
        if node not in self.probed:
            return range(0)
        k = (len(self.tokens) - self.probes_from) // len(self.probed)
        first = self.probes_from + k * self.probed.index(node)
        return range(first, first + k)

    def walk(self, choose: Callable[[int], int]) -> tuple[list[int], int]:
        """Return the accepted path from the root, and the token after it.

        `choose(i)` returns the model's token after node i. It is called only for the nodes
        of the path, in order. The path continues to the child that equals the choice.
        """
        path = [0]
        choice = choose(0)
        for node in range(1, self.probes_from):
            if self.tokens[node] == choice and self.parents[node] == path[-1]:
                path.append(node)
                choice = choose(node)
        return path, choice


def lineage(parents: tuple[int, ...], first: int = 0) -> tuple[BoolArray, IntArray]:
    """Return the ancestors of the nodes from `first` on, and the depth of every node.

    Ancestors are (n - first, n) bool, True also for the node itself; depths are (n,).
    """
    # Verified trees often have the same shape; a growing tree has a new one each time.
    if first or len(parents) > CACHED_NODES:
        return _lineage(parents, first)
    return _cached(parents, 0)


def _lineage(parents: tuple[int, ...], first: int) -> tuple[BoolArray, IntArray]:
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
    """The rows of a forward: the nodes of all trees of a batch, one after the other."""

    ids: IntArray  # (B, q)
    positions: IntArray  # (B, q)
    attends: BoolArray  # (B, q, w), to the columns after the committed ones
    column_positions: IntArray  # (B, w), positions of these columns
    drafts: int  # rows before the probes
    fed: Sequence[int]  # (B,) nodes that are already in the cache

    def row(self, b: int, tree: Tree, node: int) -> int:
        """Return the row of a node of tree b that is not in the cache."""
        if node < tree.probes_from:
            return node - self.fed[b]
        return node + self.drafts - tree.probes_from


def extent(trees: Sequence[Tree], fed: Fed = None) -> tuple[int, int]:
    """Return the maximum number of rows of drafts, and of probes, over the trees."""
    fed = fed or [0] * len(trees)
    drafts = max(tree.probes_from - before for tree, before in zip(trees, fed))
    probes = max(len(tree.tokens) - tree.probes_from for tree in trees)
    return drafts, probes


def flatten(
    trees: Sequence[Tree],
    lengths: Sequence[int],
    *,
    fed: Fed = None,
    drafts: int = 1,
    probes: int = 0,
    width: int = 0,
) -> FlatTrees:
    """Return the rows of a batch of trees, after caches of `lengths[b]` committed rows.

    The result has at least `drafts` rows of drafts, `probes` rows of probes and `width`
    columns. The first `fed[b]` nodes of tree b are already in the cache.
    """
    fed = fed or [0] * len(trees)
    extents = extent(trees, fed)
    drafts = max(drafts, extents[0])
    probes = max(probes, extents[1])
    q = drafts + probes
    width = max(width, max(fed) + q)
    starts = np.asarray(lengths, np.int64)[:, None]
    flat = FlatTrees(
        ids=np.zeros((len(trees), q), np.int64),
        positions=np.repeat(starts, q, axis=1),
        attends=np.zeros((len(trees), q, width), bool),
        column_positions=np.repeat(starts, width, axis=1),
        drafts=drafts,
        fed=fed,
    )
    for b, (tree, before) in enumerate(zip(trees, fed)):
        n = len(tree.tokens)
        ancestors, depths = lineage(tree.parents, before)
        if n - before == q:
            flat.ids[b] = tree.tokens[before:]
            flat.column_positions[b, :n] += depths
            flat.attends[b, :, :n] = ancestors
        else:
            rows = np.array([flat.row(b, tree, node) for node in range(before, n)])
            columns = np.concatenate([np.arange(before), before + rows])
            flat.ids[b, rows] = tree.tokens[before:]
            flat.column_positions[b, columns] += depths
            flat.attends[b, np.arange(q), before + np.arange(q)] = True
            flat.attends[b][np.ix_(rows, columns)] = ancestors
        flat.positions[b] = flat.column_positions[b, before : before + q]
    return flat


def mask(
    flat: FlatTrees, lengths: Sequence[int], columns: int, *, window: int | None = None
) -> BoolArray:
    """Return (B, 1, q, columns) bool, True where a row attends.

    A row attends to the committed columns of its sequence, and to its tree's columns by
    `flat.attends`. With a sliding `window`, it does not attend to a token that is
    `window` or more positions before it.
    """
    q, width = flat.attends.shape[1:]
    result = np.zeros((len(lengths), 1, q, columns), bool)
    for b, length in enumerate(lengths):
        end = min(length + width, columns)
        result[b, 0, :, :length] = True
        result[b, 0, :, length:end] = flat.attends[b, :, : end - length]
        if window is not None:
            positions = np.arange(columns)
            positions[length:end] = flat.column_positions[b, : end - length]
            result[b, 0] &= positions > flat.positions[b, :, None] - window
    return result
