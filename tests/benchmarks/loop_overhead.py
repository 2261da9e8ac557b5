"""The shares of a loop's time outside the model's forward, and in drafting, by method.

    python -m tests.benchmarks.loop_overhead [SIZE ...]      15M 110M

Random weights (so hardly a draft is accepted, and every iteration does all its work),
bfloat16, one thread, k = 5, prompts of 64 random ids, 64 new tokens. The forward is the
decoder and its head; the rest is trees, masks, picks, the cache's commit, and Python.
Drafting is `propose` and `observe` of the drafter. The table of n-grams is random.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.policy import MeasuredPolicy, prior_costs
from infer.drafters.stopwatch import Stopwatch
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.loop import Drafter, Drafters, Limits, decode
from infer.ngrams import Ngrams
from tests.benchmarks.shapes import random_llama
from tests.infer.ngram_tables import make_random_table

K = 5
PROMPT = 64
NEW = 64
VOCABULARY = 32000


def random_ngrams() -> Ngrams:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "table"
        table = make_random_table(path, order=4, vocabulary=VOCABULARY, seed=1)
    return Ngrams(table, VOCABULARY)


class Clock:
    """The seconds of a function or module, and otherwise the module."""

    def __init__(self, module: Callable[..., Any]) -> None:
        self.module = module
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = self.module(*args, **kwargs)
        self.seconds += time.perf_counter() - began
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def measure(lm: PreTrainedModel, new: Callable[[], Drafter], sampling: Sampling) -> str:
    """Return a line of figures; the first of two texts warms up."""
    runner = Runner(lm, capacity=PROMPT + NEW, max_rows=64)
    rng = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, VOCABULARY, (PROMPT,), generator=rng)
    request = [Request(prompt.tolist())]
    drafters = Drafters(new)
    target = runner._target
    drafters.propose = propose = Clock(drafters.propose)  # type: ignore[method-assign]
    drafters.observe = observe = Clock(drafters.observe)  # type: ignore[method-assign]
    target.decoder = decoder = Clock(target.decoder)
    target.head = head = Clock(target.head)
    for _ in range(2):
        steps = decode(runner, request, drafters, Limits(NEW), sampling)
        next(steps)  # the prompt's forward is not the loop's
        for clock in (propose, observe, decoder, head):
            clock.seconds = 0.0
        began = time.perf_counter()
        forwards = sum(1 for _ in steps)
        whole = time.perf_counter() - began
    outside = 1 - (decoder.seconds + head.seconds) / whole
    drafting = (propose.seconds + observe.seconds) / whole
    return (
        f"{1e3 * whole / forwards:7.2f} ms a forward, {outside:6.1%} outside it, "
        f"{drafting:6.1%} drafting"
    )


def main(sizes: list[str]) -> None:
    torch.set_num_threads(1)
    ngrams = random_ngrams()
    for size in sizes or ["15M", "110M"]:
        lm = random_llama(size, "bfloat16")
        costs = prior_costs(lm.device.type)
        auto = MeasuredPolicy(costs, K)
        every = MeasuredPolicy(costs, K)
        new = partial(AdaptiveDrafter, [7], stopwatch=Stopwatch(lm))
        methods: dict[str, Callable[[], Drafter]] = {
            "plain": Drafter,
            "two-forward": partial(new, policy=FixedPolicy(K)),
            "one-forward": partial(new, policy=FixedPolicy(K, "all")),
            "measured": partial(new, policy=auto),
            "measured, all sources": partial(new, policy=every, ngrams=ngrams),
        }
        for name, method in methods.items():
            for sampling in (Sampling(), Sampling(0.2, 10, 0.95)):
                figures = measure(lm, method, sampling)
                temperature = sampling.temperature
                print(f"{size:5} {name:23} T={temperature} {figures}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
