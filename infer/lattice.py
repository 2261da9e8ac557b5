"""The drafts of one window as a tree, grown best first.

The candidates for place j are predicted without regard to those for other places, so each may
follow each: a lattice. Its paths, the likeliest first, are a tree in which every node's parent
comes before it.

    place 1   place 2        chances 0.6, 0.3 and 0.7, 0.2      root
    a .6      c .7           nodes in order of their joint      |-- a .6
    b .3      d .2           chance: a .6, ac .42, b .3,        |   |-- c .42
                             bc .21, ad .12, bd .06             |   `-- d .12
                                                                `-- b .3 ...
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Drafts:
    """A tree of drafts: node 0 is the root; `chances[i]` is that of the path to node i being right."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    chances: list[float]

    def first(self, count: int) -> "Drafts":
        """The likeliest `count` nodes."""
        return Drafts(self.tokens[:count], self.parents[:count], self.depths[:count], self.chances[:count])

    def endings(self) -> list[float]:
        """The chance of each node to be the last accepted one."""
        found = list(self.chances)
        for node, parent in enumerate(self.parents[1:], 1):
            found[parent] -= self.chances[node]
        return found


def grow(
    root: int, ids: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], prices: Sequence[float]
) -> Drafts:
    """The likeliest paths through the candidates `ids[j][r]`, while node n's chance is above `prices[n - 1]`.

    `chances[j]` are those of the candidates for place j where all before them are right, falling.
    """
    drafts = Drafts([root], [-1], [0], [1.0])
    heap = [(-chances[0][0], 0, 0, 0)] if ids else []
    for price in prices:
        if not heap or -heap[0][0] <= price:
            break
        negative, parent, depth, rank = heapq.heappop(heap)
        node = len(drafts.tokens)
        drafts.tokens.append(ids[depth][rank])
        drafts.parents.append(parent)
        drafts.depths.append(depth + 1)
        drafts.chances.append(-negative)
        if rank + 1 < len(ids[depth]):
            rival = drafts.chances[parent] * chances[depth][rank + 1]
            heapq.heappush(heap, (-rival, parent, depth, rank + 1))
        if depth + 1 < len(ids):
            heapq.heappush(heap, (negative * chances[depth + 1][0], node, depth + 1, 0))
    return drafts
