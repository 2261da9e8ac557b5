"""What the loop asks of whatever drafts: to hang a tree under the last token, and to learn what came of it.

Nothing here decides what is emitted.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from infer.engine.reading import Candidates, Request
from infer.engine.sampling import Sampling
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
