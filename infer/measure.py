"""Decoders side by side on the same prompts: what each emitted, and how long it took.

Every decoder runs in the one decoding loop; plain decoding is that loop with zero drafts.
All decoders take turns on every prompt, in an order that rotates from round to round, so
that a change of the machine's speed meets them alike. The clock covers prefill and decoding.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import torch

from infer.loop import Drafters, Limits, decode
from infer.pick import GREEDY, Sampling
from infer.reading import Request
from infer.runner import Runner


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt decoded once. Drafts are counted per verification of at least one draft."""

    tokens: list[int]
    seconds: float
    forwards: int
    drafted: int
    accepted: int


@dataclass
class Measured:
    """One decoder over all prompts: `rounds[i][j]` is prompt j in round i."""

    rounds: list[list[Run]] = field(default_factory=list)

    @property
    def outputs(self) -> list[list[list[int]]]:
        """The tokens of every prompt, `outputs[j][i]` in round i: a drafter that learns from round to
        round drafts other trees in each.
        """
        return [[run.tokens for run in runs] for runs in zip(*self.rounds)]

    @property
    def tokens_per_second(self) -> list[float]:
        """By round."""
        return [sum(len(r.tokens) for r in row) / sum(r.seconds for r in row) for row in self.rounds]

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens over forwards of the loop (prefill not counted)."""
        return sum(len(run.tokens) for run in self._runs) / sum(run.forwards for run in self._runs)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None where nothing is drafted."""
        drafted = sum(run.drafted for run in self._runs)
        return sum(run.accepted for run in self._runs) / drafted if drafted else None

    @property
    def _runs(self) -> list[Run]:
        return list(chain.from_iterable(self.rounds))

    def speedups(self, baseline: "Measured") -> list[float]:
        """The ratio of tokens per second, round by round."""
        pairs = zip(self.tokens_per_second, baseline.tokens_per_second, strict=True)
        return [ours / theirs for ours, theirs in pairs]

    def median_rate(self) -> float:
        """Tokens per second, the median of the rounds."""
        return statistics.median(self.tokens_per_second)


Decoder = Callable[[Sequence[int]], Run]
K = TypeVar("K", bound=Hashable)


def loop_decoder(runner: Runner, drafters: Drafters, limits: Limits, sampling: Sampling = GREEDY) -> Decoder:
    """Drafters in the decoding loop, as a function of the prompt."""

    def run(prompt: Sequence[int]) -> Run:
        began, tokens, forwards, drafted, accepted = clock(), list[int](), 0, 0, 0
        for (step,) in decode(runner, [Request(prompt)], drafters, limits, sampling):
            tokens += step.tokens
            forwards += 1
            drafted += step.drafted
            accepted += step.accepted
        return Run(tokens, clock() - began, forwards, drafted, accepted)

    return run


def measure(
    decoders: Mapping[K, Decoder],
    prompts: Sequence[Sequence[int]],
    *,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[K, Measured]:
    """Run all decoders over all prompts; `advance` is called after every prompt.

    Each decoder first decodes the first prompt once, uncounted, to warm up.
    """
    for decoder in decoders.values():
        decoder(prompts[0])
    names = list(decoders)
    found = {name: Measured() for name in names}
    for round_ in range(rounds):
        for measured in found.values():
            measured.rounds.append([])
        for index, prompt in enumerate(prompts):
            turn = (round_ + index) % len(names)
            for name in names[turn:] + names[:turn]:
                found[name].rounds[-1].append(decoders[name](prompt))
            advance()
    return found


def clock() -> float:
    """Seconds, when all that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
