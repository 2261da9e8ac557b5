"""Decoders on prompts: what each emitted, how long it took, and by how many forwards.

Every decoder of ours runs in the one decoding loop; plain decoding is that loop with zero drafts. The clock
covers prefill and decoding; the time to the first step's tokens is kept apart, since it is mostly the prompt's.
"""

import time
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from infer.bench.prompts import Prompt
from infer.engine.output import Request
from infer.engine.runner import Clock, Runner, duration
from infer.engine.sampling import GREEDY, SEEDS, Sampling
from infer.loop import Drafters, Limits, Step, decode


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt decoded once; times are in seconds from the prompt on.

    Of its forwards `verifications` judged at least one draft, `drafted` drafts in all, which were `levels` deep
    in all: as many as drafted where drafts are chains.
    `first_seconds` is when the first `first_tokens` tokens were there; `rows` were fed in all forwards but the
    prompt's; `depths` says by step how deep its tree was, as far as it was judged, and `accepts` how many
    drafts were accepted. `proposed` counts the drafts by source, and `sources` the accepted ones by source and
    place; both are empty where one model drafts. `arrivals` has each step's tokens and the second at which they
    were there; empty where only whole texts are timed.
    """

    tokens: list[int]
    seconds: float
    forwards: int
    drafted: int
    accepted: int
    first_seconds: float = field(default=0.0, kw_only=True)
    first_tokens: int = field(default=0, kw_only=True)
    rows: int = field(default=0, kw_only=True)
    verifications: int = field(default=0, kw_only=True)
    levels: int = field(default=0, kw_only=True)
    depths: tuple[int, ...] = field(default=(), kw_only=True)
    accepts: tuple[int, ...] = field(default=(), kw_only=True)
    proposed: dict[str, int] = field(default_factory=dict, kw_only=True)
    sources: dict[str, list[int]] = field(default_factory=dict, kw_only=True)
    arrivals: tuple[tuple[int, float], ...] = field(default=(), kw_only=True)


@dataclass
class Measured:
    """One decoder over all prompts: `rounds[i][j]` is prompt j in round i."""

    rounds: list[list[Run]] = field(default_factory=list)

    @property
    def outputs(self) -> list[list[list[int]]]:
        """The tokens of every prompt, `outputs[j][i]` in round i: a drafter may learn between rounds."""
        return [[run.tokens for run in runs] for runs in zip(*self.rounds)]

    @property
    def tokens_per_second(self) -> list[float]:
        """By round."""
        return [
            sum(len(r.tokens) for r in row) / sum(r.seconds for r in row)
            for row in self.rounds
        ]

    def speedups(self, baseline: "Measured") -> list[float]:
        """Return the ratio of tokens per second, round by round."""
        pairs = zip(self.tokens_per_second, baseline.tokens_per_second, strict=True)
        return [ours / theirs for ours, theirs in pairs]


Decoder = Callable[[Prompt], Run]
K = TypeVar("K", bound=Hashable)


def clock() -> float:
    """Return seconds, when all that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def loop_decoder(
    runner: Runner,
    drafters: Drafters,
    limits: Limits,
    sampling: Sampling = GREEDY,
    *,
    seed: int = 0,
    clock: Clock = clock,
    stamp: Clock = time.perf_counter,
) -> Decoder:
    """Return the drafters in the decoding loop as a function of the prompt, whose seed is `seed_of` it.

    `stamp` times each step and, unlike `clock`, does not wait for the device: a step's tokens are on the host.
    """

    def run(prompt: Prompt) -> Run:
        request = Request(prompt.ids, seed_of(prompt, seed))
        own_limits = limits
        began, first, steps, times = clock(), 0.0, list[Step](), list[float]()
        for (step,) in decode(runner, [request], drafters, own_limits, sampling):
            first = first or clock()
            steps.append(step)
            times.append(stamp())
        return run_of(
            steps,
            seconds=duration(began, clock()),
            first_seconds=first - began,
            times=times,
        )

    return run


def run_of(
    steps: Sequence[Step],
    *,
    seconds: float,
    first_seconds: float,
    times: Sequence[float] = (),
) -> Run:
    """Return what the steps of one text came to; `times` says when the tokens of each were there."""
    return Run(
        [token for step in steps for token in step.tokens],
        seconds,
        len(steps),
        sum(step.drafted for step in steps),
        sum(step.accepted for step in steps),
        first_seconds=first_seconds,
        first_tokens=len(steps[0].tokens),
        rows=sum(step.rows for step in steps),
        verifications=sum(step.drafted > 0 for step in steps),
        levels=sum(step.depth for step in steps),
        depths=tuple(map(_judged, steps)),
        accepts=tuple(step.accepted for step in steps),
        proposed=dict(Counter(source for step in steps for source in step.proposed)),
        sources=_by_source(steps),
        arrivals=tuple((len(step.tokens), time) for step, time in zip(steps, times)),
    )


def _by_source(steps: Sequence[Step]) -> dict[str, list[int]]:
    """Return by source how many of its drafts were accepted at places 1, 2, ... behind the root."""
    at = Counter(
        (source, place) for step in steps for place, source in enumerate(step.sources)
    )
    ends = dict(sorted(at))
    return {
        source: [at[source, place] for place in range(end + 1)]
        for source, end in ends.items()
    }


def _judged(step: Step) -> int:
    """Return how deep drafts were judged: an end within the accepted ones hides those behind it."""
    return step.accepted if step.accepted == len(step.tokens) else step.depth


def seed_of(prompt: Prompt, seed: int) -> int:
    """Return a seed of the prompt alone: the same in every round, for every decoder and on every rank."""
    return (seed + zlib.crc32(prompt.id.encode())) % SEEDS


def measure(
    decoders: Mapping[K, Decoder],
    prompts: Sequence[Prompt],
    *,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[K, Measured]:
    """Run all decoders over all prompts; `advance` is called after every prompt.

    All take turns on every prompt, in an order that rotates from round to round, so that a change of the
    machine's speed meets them alike. Each first decodes the first prompt once, uncounted, to warm up. A rank
    that has no share of few prompts measures none.
    """
    for decoder in decoders.values() if prompts else ():
        decoder(prompts[0])
    names = list(decoders)
    measured_by_name = {name: Measured() for name in names}
    for round_ in range(rounds):
        for measured in measured_by_name.values():
            measured.rounds.append([])
        for index, prompt in enumerate(prompts):
            turn = (round_ + index) % len(names)
            for name in names[turn:] + names[:turn]:
                measured_by_name[name].rounds[-1].append(decoders[name](prompt))
            advance()
    return measured_by_name
