"""The decoding loop of every method. Plain decoding is this loop with zero drafts.

In each step the drafters propose trees, the runner computes them, and `pick` verifies them.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from infer.engine.output import Candidates, Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.trees.tree import Tree, extent

#: Takes the tokens of a sequence one by one; returns True if the text ends with the token.
Stop = Callable[[int], bool]


@dataclass(frozen=True)
class Limits:
    """The limits of a text: it ends at `max_new_tokens`, at an id of `eos`, or by its `stop`.

    `stop` maps the index of a sequence to its Stop.
    """

    max_new_tokens: int
    eos: Collection[int] = ()
    stop: Callable[[int], Stop] | None = None

    def of(self, ends: Collection[int], max_new_tokens: int | None = None) -> "Limits":
        """Return the limits with additional ids that end a text, and another length."""
        return replace(
            self,
            eos={*self.eos, *ends},
            max_new_tokens=max_new_tokens or self.max_new_tokens,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens of one sequence from one forward.

    The first `accepted` tokens are accepted drafts, and the remaining tokens are the model's
    own. Of the accepted drafts the last `shared` follow a merged node of a graph. `drafted` is
    the number of drafts in the tree, `depth` its levels, `rows` all of its nodes. `sources`
    names the source of each accepted draft, and `proposed` the source of each draft
    (drafters/candidates.py); both are empty if a draft model drafts.
    """

    sequence: int
    tokens: list[int]
    drafted: int
    accepted: int
    finished: bool
    shared: int = field(default=0, kw_only=True)
    depth: int = field(default=0, kw_only=True)
    rows: int = field(default=1, kw_only=True)
    sources: tuple[str, ...] = field(default=(), kw_only=True)
    proposed: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def kinds(self) -> list[str]:
        """The kind of each token: the source of an accepted draft, or "own" for the model's own.

        Drafts of a draft model are "drafted", or "shared" after a merged node.
        """
        drafted = self.accepted - self.shared
        own = len(self.tokens) - self.accepted
        if self.sources:
            return [*self.sources, *["own"] * own]
        return ["drafted"] * drafted + ["shared"] * self.shared + ["own"] * own


@dataclass(frozen=True, slots=True)
class Verified:
    """A sequence's tree after verification.

    `path` is the accepted path from the root, and `choice` the model's token after it.
    `answers` are the probes' candidates for the places after `choice`. The forward had `rows`
    rows of each sequence, and probes if `probed`.
    """

    tree: Tree
    path: Sequence[int]
    choice: int
    answers: Candidates | None
    rows: int
    probed: bool = False

    @property
    def tokens(self) -> list[int]:
        """The accepted tokens and the choice, including tokens after the text's end."""
        return [*(self.tree.tokens[node] for node in self.path[1:]), self.choice]


class Drafters:
    """The drafters of a batch. This class proposes only roots, which is plain decoding.

    A tree has up to `max_rows` nodes. The loop reads the `width` likeliest tokens of each probe.
    """

    max_rows = 1
    width = 1

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Begin new texts and drop the state of all earlier texts."""

    def propose(
        self, contexts: Sequence[Sequence[int]], left: Sequence[int]
    ) -> list[Tree]:
        """Return the trees to verify next, at most `left[b]` - 1 levels deep.

        Sequence b may emit `left[b]` more tokens. `contexts[b]` is its whole text so far. The
        last token of the text is the root of the tree.
        """
        return [Tree.chain(context[-1]) for context in contexts]

    def observe(self, b: int, result: Verified) -> None:
        """Learn from a verified tree of sequence b. It is not called after its last step."""

    def drop(self, b: int) -> None:
        """Remove sequence b after its last step; the last sequence gets its index."""


@dataclass
class LiveSequence:
    """A sequence that is being decoded. `left` is the number of tokens that it may still emit."""

    index: int
    request: Request
    limits: Limits
    context: list[int]
    left: int

    def __post_init__(self) -> None:
        self.stop = self.limits.stop(self.index) if self.limits.stop else None

    def advance(self, tree: Tree, path: Sequence[int], choice: int) -> Step:
        """Add the path's tokens and the choice to the text, up to its end; return the step."""
        tokens: list[int] = []
        finished = False
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
            sources=tuple(tree.sources[node] for node in accepted)
            if tree.sources
            else (),
            proposed=tree.sources[1:],
        )


def decode(
    runner: Runner,
    requests: Sequence[Request],
    drafters: Drafters,
    limits: Limits,
    sampling: Sampling = GREEDY,
) -> Iterator[list[Step]]:
    """Decode prompts as a batch; yield a step of every live sequence after each forward.

    The tokens of a sequence equal the tokens of plain decoding of this sequence alone. With
    verification by ratio they have the same distribution.
    """
    runner.prefill([request.prompt[:-1] for request in requests])
    new = limits.max_new_tokens
    live = [
        LiveSequence(index, request, limits, list(request.prompt), new)
        for index, request in enumerate(requests)
    ]
    drafters.start(requests, sampling)
    while live:
        trees = drafters.propose(
            [sequence.context for sequence in live],
            [sequence.left for sequence in live],
        )
        output = runner.forward(
            trees, [sequence.request for sequence in live], sampling
        )
        walks = [
            tree.walk(output.chooser(b, live[b].context))
            for b, tree in enumerate(trees)
        ]
        runner.commit([path for path, _ in walks])
        steps = []
        drafts, probes = extent(output.trees)  # without probes after an overflow
        for b, (sequence, tree, (path, choice)) in enumerate(zip(live, trees, walks)):
            steps.append(sequence.advance(tree, path, choice))
            if not steps[-1].finished:
                answers = output.drafts(b, path[-1], drafters.width)
                result = Verified(
                    tree, path, choice, answers, drafts + probes, probes > 0
                )
                drafters.observe(b, result)
        yield steps
        for b in reversed(range(len(live))):
            if steps[b].finished:
                runner.drop(b)
                drafters.drop(b)
                live[b] = live[-1]
                live.pop()
