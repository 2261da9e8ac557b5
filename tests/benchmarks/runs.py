"""Wrap the decoding loop as a timed function of a prompt."""

import time
from collections.abc import Callable

import torch

from infer.bench.prompts import Prompt
from infer.bench.runs import Decoder, Run, run_of, seed_of
from infer.bench.timing import StepClock
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafters, Limits, decode


def clock() -> float:
    """Wait for the device; return the time in seconds."""
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
        stamps = StepClock(clock)
        steps = []
        for (step,) in decode(runner, [request], drafters, limits, sampling):
            stamps.stamp()
            steps.append(step)
        stamps.stamp_end()
        return run_of(steps, stamps)

    return run
