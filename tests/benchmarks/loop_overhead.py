"""The shares of a loop's time that are not the model's forward, and that are drafting's, by method and size.

    python -m tests.benchmarks.loop_overhead [SIZE ...]      15M 110M

Random weights (so hardly a draft is accepted, and every iteration does all its work), bfloat16, one
thread, k = 5, prompts of 64 random ids, 64 new tokens. The forward is the decoder and its head; the
rest is trees, masks, picks, reading of drafts, the cache's commit, and Python. Drafting is `propose` and
`observe` of the drafter: n-grams, their combination with adaptive tokens, the policy. The table of n-grams
is of random texts.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.policy import MeasuredPolicy, prior_costs
from infer.drafters.stopwatch import Stopwatch
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.loop import Drafter, Drafters, Limits, decode
from infer.ngrams import Ngrams
from tests.benchmarks.shapes import random_llama
from tests.infer.ngram_tables import make_table

K, PROMPT, NEW, VOCABULARY = 5, 64, 64, 32000


def random_ngrams() -> Ngrams:
    rng = torch.Generator().manual_seed(1)
    texts = torch.randint(0, VOCABULARY, (100, 512), generator=rng).tolist()
    with TemporaryDirectory() as folder:
        table = make_table(
            Path(folder) / "table", texts, order=4, vocabulary=VOCABULARY
        )
    return Ngrams(table, VOCABULARY)


class Clock:
    def __init__(self, module: Callable[..., Any]) -> None:
        self.module, self.seconds, self.calls = module, 0.0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = self.module(*args, **kwargs)
        self.seconds += time.perf_counter() - began
        self.calls += 1
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def main(sizes: list[str]) -> None:
    torch.set_num_threads(1)
    ngrams = random_ngrams()
    for size in sizes or ["15M", "110M"]:
        lm = random_llama(size, torch.bfloat16)
        costs = prior_costs(lm.device.type)
        auto = MeasuredPolicy(costs, K)
        every = MeasuredPolicy(costs, K)
        stopwatch = Stopwatch(lm)
        methods = {
            "plain": Drafter,
            "two-forward": partial(AdaptiveDrafter, [7], FixedPolicy(K)),
            "one-forward": partial(AdaptiveDrafter, [7], FixedPolicy(K, "all")),
            "measured": partial(AdaptiveDrafter, [7], auto, stopwatch=stopwatch),
            "chain of 8, all sources": partial(
                AdaptiveDrafter, [7], FixedPolicy(K, 1, nodes=8), ngrams
            ),
            "measured, all sources": partial(
                AdaptiveDrafter, [7], every, ngrams, stopwatch=stopwatch
            ),
        }
        for name, new in methods.items():
            for sampling in (
                Sampling(),
                Sampling(0.2, 10, 0.95),
                Sampling(1.0, 0, 0.95),
            ):
                runner = Runner(lm, capacity=PROMPT + NEW, max_rows=64)
                prompt = torch.randint(
                    0, VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(1)
                )
                request = [Request(prompt.tolist())]
                drafters, inside = Drafters(new), runner._target
                propose, observe = Clock(drafters.propose), Clock(drafters.observe)
                drafters.propose, drafters.observe = propose, observe  # type: ignore[method-assign]
                inside.decoder, inside.head = decoder, head = (
                    Clock(inside.decoder),
                    Clock(inside.head),
                )
                for _ in range(2):  # the first warms up
                    steps = decode(runner, request, drafters, Limits(NEW), sampling)
                    next(steps)  # the prompt's forward is not the loop's
                    decoder.seconds = head.seconds = propose.seconds = (
                        observe.seconds
                    ) = 0.0
                    began = time.perf_counter()
                    forwards = sum(1 for _ in steps)
                    whole = time.perf_counter() - began
                computed = decoder.seconds + head.seconds
                print(
                    f"{size:5} {name:23} T={sampling.temperature} top_k={sampling.top_k:2} "
                    f"{1e3 * whole / forwards:7.2f} ms a forward, {1 - computed / whole:6.1%} outside it, "
                    f"{(propose.seconds + observe.seconds) / whole:6.1%} drafting",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
