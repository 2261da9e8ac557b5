"""What the loop asks of whatever drafts: to hang a tree under the last token, and to learn what came of it.

Nothing here decides what is emitted.

`Outcome` records a step's draft and what came of it, for infer.graph and measurements.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from infer.engine.reading import Candidates, Request
from infer.engine.sampling import Sampling
from infer.trees.token_graph import Drafts, TokenGraph
from infer.trees.tree import Tree


class Drafters(Protocol):
    """What hangs a tree under the last token of each of several sequences."""

    @property
    def max_rows(self) -> int:
        """Nodes of the largest tree."""
        ...

    @property
    def width(self) -> int:
        """Candidates wanted for each place behind a probed node."""
        ...

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """These texts come now; what was known of others is forgotten."""
        ...

    def propose(self, contexts: Sequence[Sequence[int]], left: Sequence[int]) -> list[Tree]:
        """The trees to verify next, that of sequence b no deeper than `left[b]` - 1: so many tokens may
        still be emitted. A context is the whole text so far; its last token is the tree's root.
        """
        ...

    def observe(
        self,
        b: int,
        tree: Tree,
        path: Sequence[int],
        choice: int,
        answers: Candidates | None,
        rows: int,
        seconds: float,
    ) -> None:
        """What came of the tree of sequence b: the accepted path, the token behind it, what the probes under
        the path's end say of the places behind that token, the rows that each sequence had in this forward,
        and the time of the step. Not told of a sequence that has ended.
        """
        ...

    def drop(self, b: int) -> None:
        """Forget a sequence; the last one takes its place."""
        ...


class Drafter(Protocol):
    """The same for one sequence, without regard to those beside it."""

    max_rows: int
    width: int

    def start(self, request: Request, sampling: Sampling) -> None:
        """Its text begins."""
        ...

    def propose(self, context: Sequence[int], left: int) -> Tree:
        """The tree to verify next."""
        ...

    def observe(
        self,
        tree: Tree,
        path: Sequence[int],
        choice: int,
        answers: Candidates | None,
        rows: int,
        seconds: float,
    ) -> None:
        """What came of it."""
        ...


class Each:
    """A drafter of its own for every sequence."""

    def __init__(self, new: Callable[[], Drafter]) -> None:
        self._new, self._drafters = new, list[Drafter]()
        first = new()
        self.max_rows, self.width = first.max_rows, first.width

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See Drafters."""
        self._drafters = [self._new() for _ in requests]
        for drafter, request in zip(self._drafters, requests):
            drafter.start(request, sampling)

    def propose(self, contexts: Sequence[Sequence[int]], left: Sequence[int]) -> list[Tree]:
        """See Drafters."""
        return [drafter.propose(text, n) for drafter, text, n in zip(self._drafters, contexts, left)]

    def observe(
        self,
        b: int,
        tree: Tree,
        path: Sequence[int],
        choice: int,
        answers: Candidates | None,
        rows: int,
        seconds: float,
    ) -> None:
        """See Drafters."""
        self._drafters[b].observe(tree, path, choice, answers, rows, seconds)

    def drop(self, b: int) -> None:
        """See Drafters."""
        self._drafters[b] = self._drafters[-1]
        self._drafters.pop()


class Fate(Enum):
    """Of a node of the graph. `SHARED` is an accepted one that the path came to through a merged node."""

    ACCEPTED = "accepted"
    SHARED = "accepted behind a merged node"
    REJECTED = "verified, rejected"
    DRAFTED = "not verified"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was drafted for one sequence and step, and what the target said to it.

    `drafts` is the tree that was verified, whose `nodes` say where each of its nodes stands in the graph;
    `path` are its accepted nodes from the root on; `tokens` are theirs without the root's, and the target's
    own behind them.
    """

    graph: TokenGraph
    drafts: Drafts
    path: list[int]
    tokens: list[int]
    rows: int = 0  # that a draft model was fed for it, the text's among them, probes not

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


Watch = Callable[[Outcome], None]  # told every draft, but for that of a sequence's last step


class PlainDrafter:
    """Proposes the root alone."""

    max_rows = 1
    width = 1

    def start(self, request: Request, sampling: Sampling) -> None:
        """No matter which."""

    def propose(self, context: Sequence[int], left: int) -> Tree:
        """The root."""
        return Tree.chain(context[-1])

    def observe(
        self,
        tree: Tree,
        path: Sequence[int],
        choice: int,
        answers: Candidates | None,
        rows: int,
        seconds: float,
    ) -> None:
        """Nothing to learn."""
