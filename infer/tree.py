"""A draft: a tree of tokens hung under the last emitted token. Pure data.

Node 0 is the last emitted token, not yet in the cache. A node attends to the cache, to its
ancestors and to itself; its position is the cache's length plus its depth. Probe nodes hold
adaptive tokens: attended like any other, never accepted, never committed.

    a chain of two drafts      node     0  1  2        the root with two probes looks the
    under the root:            parent   -  0  1        same; only `probes` differs
                               0 attends 1 0 0
                               1 attends 1 1 0
                               2 attends 1 1 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tree:
    """`tokens[i]` hangs under `parents[i]`, a smaller index; the root's parent is -1.

    Nodes from `probes_from` on are probes.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probes_from: int

    @classmethod
    def chain(cls, root: int, drafts: Sequence[int] = (), *, probes: Sequence[int] = ()) -> "Tree":
        """The root, drafts one under the other, then probes one under the other."""
        tokens = (root, *drafts, *probes)
        return cls(tokens, tuple(range(-1, len(tokens) - 1)), 1 + len(drafts))

    @property
    def drafted(self) -> int:
        """Nodes that may be accepted."""
        return self.probes_from - 1

    def walk(self, choices: Sequence[int]) -> list[int]:
        """The accepted path from the root: from each node on to the child that holds its choice.

        `choices[i]` is the token that the model puts after node i.
        """
        path = [0]
        for node in range(1, self.probes_from):
            if self.parents[node] == path[-1] and self.tokens[node] == choices[path[-1]]:
                path.append(node)
        return path


@lru_cache(maxsize=256)
def depths(parents: tuple[int, ...]) -> Tensor:
    """(q,) int64 distance of each node from the root."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return torch.tensor(found)


@lru_cache(maxsize=256)
def ancestors(parents: tuple[int, ...]) -> Tensor:
    """(q, q) bool: row i is True at i and at every ancestor of i."""
    found = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            found[node] |= found[parent]
    return found
