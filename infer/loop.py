"""The decoding loop: one for every method. Plain decoding is this loop with zero drafts.

Knows the order of the verbs; what they do is the drafter's, the runner's and the pick's.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from infer.layout import extent
from infer.pick import GREEDY, Sampling
from infer.reading import Candidates, Request
from infer.runner import Runner
from infer.tree import Tree


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
        self, b: int, tree: Tree, path: Sequence[int], choice: int, drafts: Candidates | None, rows: int
    ) -> None:
        """What came of the tree of sequence b: the accepted path, the token behind it, what the probes under
        the path's end say of the places behind that token, and the rows that each sequence had in
        this forward. Not told of a sequence that has ended.
        """
        ...

    def drop(self, b: int) -> None:
        """Forget a sequence; the last one takes its place."""
        ...


class Drafter(Protocol):
    """The same for one sequence, without regard to those beside it."""

    max_rows: int
    width: int

    def propose(self, context: Sequence[int], left: int) -> Tree:
        """The tree to verify next."""
        ...

    def observe(
        self, tree: Tree, path: Sequence[int], choice: int, drafts: Candidates | None, rows: int
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

    def propose(self, contexts: Sequence[Sequence[int]], left: Sequence[int]) -> list[Tree]:
        """See Drafters."""
        return [one.propose(context, n) for one, context, n in zip(self._drafters, contexts, left)]

    def observe(
        self, b: int, tree: Tree, path: Sequence[int], choice: int, drafts: Candidates | None, rows: int
    ) -> None:
        """See Drafters."""
        self._drafters[b].observe(tree, path, choice, drafts, rows)

    def drop(self, b: int) -> None:
        """See Drafters."""
        self._drafters[b] = self._drafters[-1]
        self._drafters.pop()


Stop = Callable[[int], bool]  # told every token of a sequence in turn: does the text end with it?


@dataclass(frozen=True)
class Limits:
    """When a text ends: with its `max_new_tokens`th token, with an id of `eos`, or where `stop` says."""

    max_new_tokens: int
    eos: Collection[int] = ()
    stop: Callable[[int], Stop] | None = None  # the one of each sequence, by its index

    def also(self, ends: Collection[int]) -> "Limits":
        """With more ids that end a text."""
        return replace(self, eos={*self.eos, *ends})


@dataclass(frozen=True, slots=True)
class Step:
    """One forward's yield for one sequence.

    The first `accepted` of the tokens were drafted, the last `shared` of these behind a merged node of a graph;
    the others are the model's own pick. `drafted` counts the nodes that might have been accepted, `depth` how
    many at most; `rows` are all nodes of the sequence's tree, its root and its probes too.
    """

    sequence: int
    tokens: list[int]
    drafted: int
    accepted: int
    finished: bool
    shared: int = field(default=0, kw_only=True)
    depth: int = field(default=0, kw_only=True)
    rows: int = field(default=1, kw_only=True)


@dataclass
class Live:
    """A sequence that is being decoded."""

    index: int
    request: Request
    limits: Limits
    context: list[int]
    left: int
    stop: Stop | None = field(init=False)

    def __post_init__(self) -> None:
        self.stop = self.limits.stop(self.index) if self.limits.stop else None

    def advance(self, tree: Tree, path: Sequence[int], choice: int) -> Step:
        """Emit the path's tokens and the choice, as far as the text goes."""
        tokens, finished = list[int](), False
        for token in (*(tree.tokens[node] for node in path[1:]), choice):
            tokens.append(token)
            self.left -= 1
            stopped = self.stop is not None and self.stop(token)
            finished = self.left == 0 or token in self.limits.eos or stopped
            if finished:
                break
        self.context += tokens
        accepted = path[1 : len(tokens) + 1]
        shared = sum(node in tree.shared for node in accepted)
        return Step(
            self.index,
            tokens,
            tree.drafted,
            len(accepted),
            finished,
            shared=shared,
            depth=tree.depth,
            rows=len(tree.tokens),
        )


def decode(
    runner: Runner,
    requests: Sequence[Request],
    drafters: Drafters,
    limits: Limits,
    sampling: Sampling = GREEDY,
) -> Iterator[list[Step]]:
    """Decode prompts side by side; each forward yields a step of every sequence that goes on.

    The tokens of a sequence's steps are exactly those of plain decoding, and of decoding it alone;
    where drafts are verified by ratio, distributed as those of plain decoding.
    """
    runner.prefill([request.prompt[:-1] for request in requests])
    live = [
        Live(index, request, limits, list(request.prompt), limits.max_new_tokens)
        for index, request in enumerate(requests)
    ]
    drafters.start(requests, sampling)
    while live:
        trees = drafters.propose([one.context for one in live], [one.left for one in live])
        reading = runner.forward(trees, [one.request for one in live], sampling)
        walks = [tree.walk(reading.chooser(b, live[b].context)) for b, tree in enumerate(trees)]
        runner.commit([path for path, _ in walks])
        steps, rows = [], sum(extent(trees))
        for b, (one, tree, (path, choice)) in enumerate(zip(live, trees, walks)):
            steps.append(one.advance(tree, path, choice))
            if not steps[-1].finished:
                drafts = reading.drafts(b, path[-1], drafters.width)
                drafters.observe(b, tree, path, choice, drafts, rows)
        yield steps
        for b in reversed(range(len(live))):
            if steps[b].finished:
                runner.drop(b)
                drafters.drop(b)
                live[b] = live[-1]
                live.pop()
