r"""A draft as a graph: hypotheses that share what follows them (GSD §5). Pure data.

Node 0 is the last emitted token. Every other node hangs under its parent; a *merged* node has no
children of its own, but those of another node, which stands for the same continuation. Every path
from the root is a hypothesis.

    the graph, after the paper's Figure 2            its tree, after Figure 4 (unrolled)

        0 the                                            the
       / \                                              /   \
    1 a   2 one                                        a     one
      |     |                                          |       |
    3 red 4 red . . .                                 red     red
      |              : merged into 3,                  |       |
    5 car  . . . . . : so 5 comes behind 4 too        car     car

    tokens   the a one red red car        node of the graph   0 1 2 3 4 5 5
    parents  -   0 0   1   2   3          parent in the tree  - 0 0 1 2 3 4
    merged   {4: 3}                       (in the order of their joint chances)
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum


@dataclass(slots=True)
class TokenGraph:
    """`chances[i]` is that of node i behind its parent; `children[i]` are the nodes behind node i, the
    likeliest first, and a merged node's are the list of the node that it was merged into.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    chances: list[float] = field(default_factory=lambda: [1.0])
    children: list[list[int]] = field(default_factory=lambda: [[]])
    merged: dict[int, int] = field(default_factory=dict)

    @property
    def drafted(self) -> int:
        """The number of nodes without the root and merged ones, as the authors' code counts drafted tokens."""
        return len(self.tokens) - 1 - len(self.merged)

    def add(self, parent: int, token: int, chance: float) -> int:
        """Add a node under a parent that is not merged; siblings come in falling order of chance."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.chances.append(chance)
        self.children.append([])
        self.children[parent].append(node)
        return node

    def follow(
        self, tokens: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], int | None]]:
        """Yield the candidates for each of a text's tokens behind the root, and the one that holds it.

        It ends where there are no candidates, and behind those of which none holds the token (None).
        """
        node: int | None = 0
        for token in tokens:
            children = self.children[node] if node is not None else ()
            if not children:
                return
            node = next(
                (child for child in children if self.tokens[child] == token), None
            )
            yield children, node

    def merge(self, node: int, into: int) -> None:
        """Merge: let `node`, which has no children, share those of `into`, now and later."""
        self.children[node] = self.children[into]
        self.merged[node] = into


@dataclass(frozen=True, slots=True)
class Drafts:
    """A tree: `chances[i]` of the path to node i being right, `nodes[i]` the graph's; node 0 is the root."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    chances: list[float]
    nodes: list[int]

    def first(self, count: int) -> "Drafts":
        """Return the likeliest `count` nodes."""
        n = count
        return Drafts(
            self.tokens[:n],
            self.parents[:n],
            self.depths[:n],
            self.chances[:n],
            self.nodes[:n],
        )

    def hang(self, graph: TokenGraph, node: int, parent: int, chance: float) -> None:
        """Add a node of the graph under a node of the tree; `chance` is that of the path to it."""
        self.tokens.append(graph.tokens[node])
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.chances.append(chance)
        self.nodes.append(node)

    def shared(self, graph: TokenGraph) -> frozenset[int]:
        """Return the nodes that a path reaches through a merged node."""
        result: set[int] = set()
        for node in range(1, len(self.nodes)) if graph.merged else ():
            parent = self.parents[node]
            if (
                parent in result
                or graph.parents[self.nodes[node]] != self.nodes[parent]
            ):
                result.add(node)
        return frozenset(result)

    def endings(self) -> list[float]:
        """Return the chance of each node to be the last accepted one."""
        chances = list(self.chances)
        for node, parent in enumerate(self.parents[1:], 1):
            chances[parent] -= self.chances[node]
        return chances


def unroll(
    graph: TokenGraph,
    prices: Sequence[float],
    *,
    depth: int,
    calibrated: Callable[[float, int], float] | None = None,
    expand: Callable[[int], None] | None = None,
) -> Drafts:
    """Return the graph's likeliest paths as a tree, while node n's chance is above `prices[n - 1]`.

    `calibrated` makes of a node's chance behind its parent, and of its place, how often such drafts were right.
    `expand` hangs a node's children under it when they are first looked for: such a graph has no merged nodes.

    §5.4: merged nodes are parted again, and each gets a copy of what follows. Every node comes behind its
    parent, so that the first n nodes are a tree, and the likeliest one of n nodes.
    """
    drafts = Drafts([graph.tokens[0]], [-1], [0], [1.0], [0])
    heap: list[
        tuple[float, int, int]
    ] = []  # (-chance, parent in the tree, rank among its children)
    lowest = min(prices, default=1.0)

    def offer(parent: int, rank: int) -> None:
        if drafts.depths[parent] == depth or drafts.chances[parent] <= lowest:
            return  # what follows is no likelier
        node = drafts.nodes[parent]
        if expand and not rank:
            expand(node)
        behind = graph.children[node]
        if rank < len(behind):
            chance = graph.chances[behind[rank]]
            if calibrated:
                chance = calibrated(chance, drafts.depths[parent])
            heapq.heappush(heap, (-drafts.chances[parent] * chance, parent, rank))

    offer(0, 0)
    for price in prices:
        if not heap or -heap[0][0] <= price:
            break
        negative, parent, rank = heapq.heappop(heap)
        node = graph.children[drafts.nodes[parent]][rank]
        drafts.hang(graph, node, parent, -negative)
        offer(parent, rank + 1)
        offer(len(drafts.tokens) - 1, 0)
    return drafts


def unroll_levels(graph: TokenGraph, most: int, *, depth: int) -> Drafts:
    """Return the graph as a tree of up to `most` drafts; the likeliest nodes of a level get all their children.
    So what a node's children are decides nothing, as verification by ratio wants it (pick.py).
    """
    drafts = Drafts([graph.tokens[0]], [-1], [0], [1.0], [0])
    level = [0]
    for _ in range(depth):
        first = len(drafts.tokens)
        for parent in sorted(level, key=drafts.chances.__getitem__, reverse=True):
            children = graph.children[drafts.nodes[parent]]
            if len(drafts.tokens) + len(children) <= 1 + most:
                for node in children:
                    drafts.hang(
                        graph,
                        node,
                        parent,
                        drafts.chances[parent] * graph.chances[node],
                    )
        level = list(range(first, len(drafts.tokens)))
    return drafts


class Fate(Enum):
    """What became of a node of the graph; a `SHARED` node was reached through a merged node."""

    ACCEPTED = "accepted"
    SHARED = "accepted behind a merged node"
    REJECTED = "verified, rejected"
    DRAFTED = "not verified"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A sequence's draft in one step: `drafts` is the tree that was verified, `path` its accepted nodes from
    the root on, `tokens` theirs without the root's, and the target's own token behind them.
    """

    graph: TokenGraph
    drafts: Drafts
    path: list[int]
    tokens: list[int]
    rows: int = 0  # of the draft model for it, with those of the text, without probes

    @property
    def accepted(self) -> list[int]:
        """The accepted path's nodes of the graph, from the root on."""
        return [self.drafts.nodes[node] for node in self.path]

    @property
    def succeeded(self) -> bool:
        """Whether the accepted path goes on behind a merged node (GSD §6.2, "graph success")."""
        return any(node in self.graph.merged for node in self.accepted[:-1])

    @property
    def fates(self) -> list[Fate]:
        """Of each node of the graph; a node with several copies in the tree fares as the best of them."""
        fates = [Fate.DRAFTED] * len(self.graph.tokens)
        for node in self.drafts.nodes:
            fates[node] = Fate.REJECTED
        fate = Fate.ACCEPTED
        path = self.accepted
        for before, node in zip([-1, *path], path):
            if self.graph.parents[node] != before:
                fate = Fate.SHARED
            fates[node] = fate
        return fates


Watch = Callable[[Outcome], None]  # called with every draft but a sequence's last
