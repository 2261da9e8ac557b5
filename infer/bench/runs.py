"""One prompt decoded once: its tokens, times and counts of drafts."""

import hashlib
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
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

    A verification is a forward that judged at least one draft. `right` counts the accepted
    drafts by position.
    """

    tokens: list[int]
    seconds: float
    first_seconds: float = 0.0  # to the first tokens
    forwards: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
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
        limit = prompt.max_new_tokens or decode.max_new_tokens
        limited = replace(decode, max_new_tokens=limit)
        for step in generate(model, [prompt.ids], limited, seeds=seeds):
            first = first or time.perf_counter()  # the tokens are on the host
            steps.append(step)
        seconds = duration(began, time.perf_counter())
        return run_of(steps, seconds=seconds, first_seconds=first - began)

    return run


def run_of(steps: Sequence[Step], *, seconds: float, first_seconds: float) -> Run:
    """Return the run that consists of these steps."""
    accepted = [step.accepted for step in steps]
    return Run(
        tokens=[token for step in steps for token in step.tokens],
        seconds=seconds,
        first_seconds=first_seconds,
        forwards=len(steps),
        verifications=sum(step.drafted > 0 for step in steps),
        drafted=sum(step.drafted for step in steps),
        accepted=sum(accepted),
        right=[
            sum(count > position for count in accepted)
            for position in range(max(accepted, default=0))
        ],
        sources=dict(Counter(source for step in steps for source in step.sources)),
    )


def seed_of(prompt: Prompt, seed: int) -> int:
    """Return the prompt's seed: the same in every round, for every decoder and rank."""
    return (seed + zlib.crc32(prompt.id.encode())) % SEEDS
