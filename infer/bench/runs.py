"""One prompt decoded once: its tokens, times and counts of drafts."""

import hashlib
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from infer.api import Model, generate
from infer.bench.prompts import Prompt
from infer.config import DecodeConfig
from infer.engine.runner import duration
from infer.engine.sampling import SEEDS
from infer.loop import Step


@dataclass
class Run:
    """A prompt decoded once. Times are in seconds from the start of the prompt's forward.

    A verification is a forward that judged at least one draft. Lists count drafts by position:
    `reached` those judged whose predecessors were all accepted, `right` the accepted ones.
    """

    tokens: list[int]
    seconds: float
    first_seconds: float = 0.0  # to the first tokens
    forwards: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)  # accepted drafts by source

    def record(self) -> dict[str, Any]:
        """Return the run as JSON, with the number and a hash of its tokens."""
        text = hashlib.sha256(str(self.tokens).encode()).hexdigest()[:16]
        return asdict(self) | {"tokens": len(self.tokens), "text": text}


Decoder = Callable[[Prompt], Run]


def decoder(model: Model, decode: DecodeConfig, *, seed: int) -> Decoder:
    """Return the decoder of these settings as a function of the prompt."""

    def run(prompt: Prompt) -> Run:
        began = time.perf_counter()
        first = 0.0
        steps: list[Step] = []
        seeds = [seed_of(prompt, seed)]
        for step in generate(model, [prompt.ids], decode, seeds=seeds):
            first = first or time.perf_counter()  # the tokens are on the host
            steps.append(step)
        seconds = duration(began, time.perf_counter())
        return run_of(steps, seconds=seconds, first_seconds=first - began)

    return run


def run_of(steps: Sequence[Step], *, seconds: float, first_seconds: float) -> Run:
    """Return the run that consists of these steps."""
    reached = []
    for step in steps:
        # Drafts behind the end of the text were not judged.
        ended = step.accepted == len(step.tokens)
        reached.append(step.accepted if ended else min(step.depth, step.accepted + 1))
    accepted = [step.accepted for step in steps]
    return Run(
        tokens=[token for step in steps for token in step.tokens],
        seconds=seconds,
        first_seconds=first_seconds,
        forwards=len(steps),
        verifications=sum(step.drafted > 0 for step in steps),
        drafted=sum(step.drafted for step in steps),
        accepted=sum(accepted),
        reached=by_position(reached),
        right=by_position(accepted),
        sources=dict(Counter(source for step in steps for source in step.sources)),
    )


def by_position(depths: Sequence[int]) -> list[int]:
    """Return how many of the depths are at least 1, 2, ... up to the deepest."""
    deepest = max(depths, default=0)
    return [
        sum(depth >= position for depth in depths) for position in range(1, deepest + 1)
    ]


def seed_of(prompt: Prompt, seed: int) -> int:
    """Return the prompt's seed: the same in every round, for every decoder and rank."""
    return (seed + zlib.crc32(prompt.id.encode())) % SEEDS
