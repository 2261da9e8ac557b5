"""Decoders of the decoding loop as functions of a prompt, timed."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from infer.bench.prompts import Prompt
from infer.bench.runs import seed_of
from infer.engine.output import Request
from infer.engine.runner import Runner, duration
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafters, Limits, Step, decode


@dataclass
class Run:
    """One prompt decoded once, in seconds from the start of its forward."""

    tokens: list[int]
    seconds: float
    forwards: int


Decoder = Callable[[Prompt], Run]


def clock() -> float:
    """Return seconds after all work of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def loop_decoder(
    runner: Runner,
    drafters: Drafters,
    limits: Limits,
    sampling: Sampling = GREEDY,
    *,
    clock: Callable[[], float] = clock,
) -> Decoder:
    """Return the decoding loop with these drafters as a function of the prompt."""

    def run(prompt: Prompt) -> Run:
        request = Request(prompt.ids, seed_of(prompt, 0))
        began = clock()
        steps: list[Step] = [
            step for (step,) in decode(runner, [request], drafters, limits, sampling)
        ]
        seconds = duration(began, clock())
        tokens = [token for step in steps for token in step.tokens]
        return Run(tokens, seconds, len(steps))

    return run
