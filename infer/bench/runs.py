"""Decode a prompt once and count its tokens, times and drafts; order such runs."""

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from infer.api import Model, generate
from infer.bench.prompts import Prompt
from infer.bench.timing import Shape, StepClock, StepTimes
from infer.config import DecodeConfig
from infer.engine.runner import TICK
from infer.engine.sampling import SEEDS
from infer.loop import Step

K = TypeVar("K")


@dataclass
class Run:
    """A prompt that was decoded once. Times are in seconds from the start of the prompt's forward.

    A verification is a forward with at least one draft. `right[i]` counts the verifications
    that accepted the draft at position i.
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
    steps: StepTimes | None = None

    def record(self) -> dict[str, Any]:
        """Return the run as JSON, with the number and a hash in place of its tokens."""
        text = hashlib.sha256(str(self.tokens).encode()).hexdigest()[:16]
        steps = self.steps and self.steps.record()
        return asdict(self) | {"tokens": len(self.tokens), "text": text, "steps": steps}


Decoder = Callable[[Prompt], Run]


def decoder(model: Model, decode: DecodeConfig, *, seed: int) -> Decoder:
    """Return a function that decodes a prompt with these settings."""

    def run(prompt: Prompt) -> Run:
        clock = StepClock()
        steps: list[Step] = []
        seeds = [seed_of(prompt, seed)]
        limit = prompt.max_new_tokens or decode.max_new_tokens
        limited = replace(decode, max_new_tokens=limit)
        for step in generate(model, [prompt.ids], limited, seeds=seeds):
            clock.stamp()  # the tokens are on the host
            steps.append(step)
        clock.stamp_end()
        return run_of(steps, clock)

    return run


def run_of(steps: Sequence[Step], clock: StepClock) -> Run:
    """Return the run of these steps; the clock has a stamp for each step."""
    accepted = [step.accepted for step in steps]
    times = clock.times([shape_of(step) for step in steps])
    return Run(
        tokens=[token for step in steps for token in step.tokens],
        seconds=max(TICK, clock.seconds),
        first_seconds=clock.first_seconds,
        forwards=len(steps),
        verifications=sum(step.drafted > 0 for step in steps),
        drafted=sum(step.drafted for step in steps),
        accepted=sum(accepted),
        right=[
            sum(count > position for count in accepted)
            for position in range(max(accepted, default=0))
        ],
        sources=dict(Counter(source for step in steps for source in step.sources)),
        steps=times,
    )


def shape_of(step: Step) -> Shape:
    """Return the shape of a step. Drafts without a named source come from a draft model."""
    levels = 0 if step.proposed else step.depth
    return Shape(levels, step.rows - 1 - step.drafted, step.rows)


def seed_of(prompt: Prompt, seed: int) -> int:
    """Return the seed of a prompt, which is the same for every round, decoder and rank."""
    return (seed + zlib.crc32(prompt.id.encode())) % SEEDS


def blocks(names: Sequence[K], plain: K, turn: int) -> list[list[K]]:
    """Return the order of the decoders in a turn, in blocks with a run of `plain` each.

    One run of plain decoding is the pair of its two neighbours. The order changes by turn:

        turn 0    A plain B    C plain D    E plain
        turn 1    B plain A    D plain C    plain E
        turn 2    B plain C    D plain E    A plain
    """
    if not names:
        return [[plain]]
    shift = turn // 2 % len(names)
    rotated = [*names[shift:], *names[:shift]]
    turns = [
        [rotated[at], plain, *rotated[at + 1 : at + 2]]
        for at in range(0, len(names), 2)
    ]
    return [block[::-1] for block in turns] if turn % 2 else turns
