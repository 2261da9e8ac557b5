r"""A draft as a graph of hypotheses that share continuations (GSD §5). Pure data.

Node 0 is the last emitted token. Every other node has a parent. Every path from the root
is a hypothesis. A *merged* node shares the children of another node, because both have
the same continuations.

    the graph, after the paper's Figure 2            its tree, after Figure 4 (unrolled)

        0 the                                            the
       / \                                              /   \
    1 a   2 one                                        a     one
      |     |                                          |       |
    3 red 4 red . . .                                 red     red
      |              : merged into 3,                  |       |
    5 car  . . . . . : so 5 follows 4 too             car     car

    tokens   the a one red red car        node of the graph   0 1 2 3 4 5 5
    parents  -   0 0   1   2   3          parent in the tree  - 0 0 1 2 3 4
    merged   {4: 3}                       (in the order of their joint chances)
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenGraph:
    """The nodes of a graph: token, parent, probability given the parent, and children.

    `children[i]` is sorted by decreasing probability. A merged node and the node that it was
    merged into have the same list object.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    chances: list[float] = field(default_factory=lambda: [1.0])
    children: list[list[int]] = field(default_factory=lambda: [[]])
    merged: dict[int, int] = field(default_factory=dict)

    @property
    def drafted(self) -> int:
        """The number of drafted tokens without the root and merged nodes, as in the paper."""
        return len(self.tokens) - 1 - len(self.merged)

    def add(self, parent: int, token: int, chance: float) -> int:
        """Add a node under a parent that is not merged, and return its index.

        Siblings must be added by decreasing probability `chance`.
        """
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
        """Yield for each token its candidates, and the candidate that equals the token.

        Stop at a node without candidates, and after the first token without an equal
        candidate, which yields None.
        """
        node: int | None = 0
        for token in tokens:
            if node is None or not self.children[node]:
                return
            children = self.children[node]
            node = self.child(node, token)
            yield children, node

    def child(self, node: int, token: int) -> int | None:
        """Return the candidate after a node that equals the token; None if there is no such candidate."""
        children = self.children[node]
        return next((child for child in children if self.tokens[child] == token), None)

    def merge(self, node: int, into: int) -> None:
        """Make `node`, which has no children, share the present and later children of `into`."""
        self.children[node] = self.children[into]
        self.merged[node] = into


@dataclass(frozen=True, slots=True)
class Drafts:
    """A tree of drafts. Node 0 is the root.

    `chances[i]` is the joint probability of the path to node i, and `nodes[i]` is its node in
    the graph.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    chances: list[float]
    nodes: list[int]

    @classmethod
    def root(cls, graph: TokenGraph) -> "Drafts":
        """Return a tree of the last emitted token alone, without drafts."""
        return cls([graph.tokens[0]], [-1], [0], [1.0], [0])

    def first(self, count: int) -> "Drafts":
        """Return the tree of the first `count` nodes, which are the likeliest."""
        return Drafts(
            self.tokens[:count],
            self.parents[:count],
            self.depths[:count],
            self.chances[:count],
            self.nodes[:count],
        )

    def hang(self, graph: TokenGraph, node: int, parent: int, chance: float) -> None:
        """Add a graph node under a tree node; `chance` is its path's joint probability."""
        self.tokens.append(graph.tokens[node])
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.chances.append(chance)
        self.nodes.append(node)

    def shared(self, graph: TokenGraph) -> frozenset[int]:
        """Return the nodes that follow a merged node, at any distance."""
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
        """Return for each node the probability that it is the last accepted node."""
        chances = list(self.chances)
        for node, parent in enumerate(self.parents[1:], 1):
            chances[parent] -= self.chances[node]
        return chances


def unroll(
    graph: TokenGraph,
    prices: Sequence[float],
    *,
    depth: int,
    calibrated: Callable[[int], float] | None = None,
    expand: Callable[[int], None] | None = None,
) -> Drafts:
    """Return the graph's likeliest paths as a tree (GSD §5.4).

    Nodes are added by decreasing joint probability. Node n is added only if its joint
    probability is above `prices[n - 1]`. Merged nodes get copies of their continuations.
    Parents come before children, so the first n nodes are the likeliest tree of n nodes.
    The tree has at most `depth` levels.

    `calibrated` maps a node of the graph to the observed acceptance rate of such drafts.
    `expand` adds a node's children to the graph on demand; a graph with `expand` has no merged
    nodes.
    """
    drafts = Drafts.root(graph)
    # (negative joint probability, parent in the tree, rank among the parent's children)
    heap: list[tuple[float, int, int]] = []
    lowest = min(prices, default=1.0)

    def offer(parent: int, rank: int) -> None:
        if drafts.depths[parent] == depth or drafts.chances[parent] <= lowest:
            return  # its children are at most as likely
        node = drafts.nodes[parent]
        if expand and not rank:
            expand(node)
        children = graph.children[node]
        if rank < len(children):
            child = children[rank]
            chance = calibrated(child) if calibrated else graph.chances[child]
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
    """Return the graph as a tree of at most `most` drafts, in families of siblings.

    The likeliest nodes of each level come first. A node gets all of its children if they
    fit, otherwise no child. So the choice does not depend on the children's tokens, as
    verification by ratio requires (pick.py).
    """
    drafts = Drafts.root(graph)
    level = [0]
    for _ in range(depth):
        first = len(drafts.tokens)
        for parent in sorted(level, key=drafts.chances.__getitem__, reverse=True):
            children = graph.children[drafts.nodes[parent]]
            if len(drafts.tokens) + len(children) <= 1 + most:
                for node in children:
                    chance = drafts.chances[parent] * graph.chances[node]
                    drafts.hang(graph, node, parent, chance)
        level = list(range(first, len(drafts.tokens)))
    return drafts


@dataclass(frozen=True, slots=True)
class Outcome:
    """A sequence's draft in one step, after verification.

    The verification of a sequence's last step is not observed: its `path` has only the root,
    and its `tokens` are empty. With a draft model, `draft_seconds` is the time of the draft
    model's forwards in this step, and `verification_seconds` is the time from the proposal to
    the result.
    """

    graph: TokenGraph
    drafts: Drafts  # the verified tree
    path: list[int]  # the accepted nodes of `drafts`, from the root
    tokens: list[
        int
    ]  # the emitted tokens: accepted drafts, then the target's own token
    rows: int = 0  # rows of the draft model's forwards, including text, without probes
    draft_seconds: float = 0.0
    verification_seconds: float = 0.0

    @property
    def accepted(self) -> list[int]:
        """The graph nodes of the accepted path, from the root."""
        return [self.drafts.nodes[node] for node in self.path]

    @property
    def succeeded(self) -> bool:
        """True if the accepted path continues after a merged node (GSD §6.2)."""
        return any(node in self.graph.merged for node in self.accepted[:-1])


#: Called with the draft of every step that has one.
Watch = Callable[[Outcome], None]
