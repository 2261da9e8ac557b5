"""The interface of drafters: propose a tree under the last token, and learn from its verification.

Nothing here decides what is emitted. `Outcome` records a draft and its verification for infer.graph and
measurements.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from infer.engine.reading import Candidates, Request
from infer.engine.sampling import Sampling
from infer.trees.token_graph import Drafts, TokenGraph
from infer.trees.tree import Tree


@dataclass(frozen=True, slots=True)
class Verified:
    """What one forward made of a sequence's tree.

    `path` is the accepted path from the root, `choice` the token behind it, `answers` what the probes under
    the path's end predict behind `choice`, `rows` the rows of each sequence in the forward, and `seconds` the
    time of the step.
    """

    tree: Tree
    path: Sequence[int]
    choice: int
    answers: Candidates | None
    rows: int
    seconds: float

    @property
    def tokens(self) -> list[int]:
        """The emitted tokens, without regard to the text's end."""
        return [*(self.tree.tokens[node] for node in self.path[1:]), self.choice]


class Drafter:
    """Drafts for one sequence; itself it proposes the root alone, which is plain decoding.

    `max_rows` bounds the nodes of a tree; `width` is the number of candidates that are read for each place
    behind a probed node.
    """

    max_rows = 1
    width = 1

    def start(self, request: Request, sampling: Sampling) -> None:
        """Begin a text."""

    def propose(self, context: Sequence[int], left: int) -> Tree:
        """Return the tree to verify next, no deeper than `left` - 1, the tokens that may still be emitted.

        `context` is the whole text so far; its last token is the tree's root.
        """
        return Tree.chain(context[-1])

    def observe(self, result: Verified) -> None:
        """Learn from the result. It is not called with a sequence's last step."""


class Drafters:
    """Drafts for the sequences of a batch; itself each sequence by a `Drafter` of its own."""

    def __init__(self, new: Callable[[], Drafter] = Drafter) -> None:
        self._new, self._drafters = new, list[Drafter]()
        first = new()
        self.max_rows, self.width = first.max_rows, first.width

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Begin new texts, and forget all others."""
        self._drafters = [self._new() for _ in requests]
        for drafter, request in zip(self._drafters, requests):
            drafter.start(request, sampling)

    def propose(self, contexts: Sequence[Sequence[int]], left: Sequence[int]) -> list[Tree]:
        """Return the tree of each sequence; see Drafter."""
        return [drafter.propose(text, n) for drafter, text, n in zip(self._drafters, contexts, left)]

    def observe(self, b: int, result: Verified) -> None:
        """Learn from the result of sequence b; see Drafter."""
        self._drafters[b].observe(result)

    def drop(self, b: int) -> None:
        """Forget a sequence; the last one takes its place."""
        self._drafters[b] = self._drafters[-1]
        self._drafters.pop()


class Fate(Enum):
    """What became of a node of the graph; a `SHARED` node was reached through a merged node."""

    ACCEPTED = "accepted"
    SHARED = "accepted behind a merged node"
    REJECTED = "verified, rejected"
    DRAFTED = "not verified"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The draft of one sequence in one step, and its verification.

    `drafts` is the tree that was verified, whose `nodes` say where each of its nodes stands in the graph;
    `path` are its accepted nodes from the root on; `tokens` are theirs without the root's, and the target's own
    token behind them.
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
        fate, path = Fate.ACCEPTED, self.accepted
        for before, node in zip([-1, *path], path):
            if self.graph.parents[node] != before:
                fate = Fate.SHARED
            fates[node] = fate
        return fates


Watch = Callable[[Outcome], None]  # called with every draft but a sequence's last
Each, PlainDrafter = Drafters, Drafter
