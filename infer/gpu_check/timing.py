"""How long things take on this device: the clock is read when the device has nothing left to do.

Every figure is a median over rounds, with the lower and upper quartile beside it; what is compared
takes turns.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from conf.clock import duration
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.engine.reading import Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.loop import Drafter, Drafters, Limits, decode
from infer.trees.tree import Tree

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
WARM_UPS = 3
TURNS = 5  # of the loops, each on a text of its own
K = TypeVar("K")
Spread = dict[str, float]  # median, lower and upper quartile


def clock(device: torch.device) -> float:
    """Return seconds, when all that was launched is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def in_turns(tasks: Mapping[K, Callable[[], Any]], *, rounds: int, device: torch.device) -> dict[K, Spread]:
    """Return milliseconds of each task."""
    for task in tasks.values():
        for _ in range(WARM_UPS):
            task()
    times: dict[K, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            began = clock(device)
            task()
            times[name].append(1e3 * duration(began, clock(device)))
    return {name: spread(seconds) for name, seconds in times.items()}


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def cost_of_rows(lm: PreTrainedModel, *, context: int, rounds: int, compile: bool) -> dict[int, Spread]:
    """Measure L(q) in milliseconds: a forward of q rows, its picks on the host."""
    runner = Runner(lm, capacity=context, max_rows=ROWS[-1], static=True, compile=compile)
    # As costs.py does: one row and many fit the same columns, or only one of them would pay for more.
    runner.prefill([_prompt(lm, max(1, context - ROWS[-1]))])

    def forward(q: int) -> None:
        tree = Tree.chain(1, [1] * (q - 1))
        tree.walk(runner.forward([tree], [Request([1])], GREEDY).chooser(0, ()))

    return in_turns({q: partial(forward, q) for q in ROWS}, rounds=rounds, device=lm.device)


def loops(
    lm: PreTrainedModel, ks: Sequence[int], *, context: int, rounds: int, compile: bool
) -> dict[str, Spread]:
    """Return milliseconds of a loop: a plain step, two forwards of two-forward SDSAT, one of one-forward.

    With random weights next to nothing is accepted, so these are times of loops, not of tokens.
    """
    drafters: dict[str, Callable[[], Drafter]] = {"plain": Drafter}
    for k in ks:
        drafters[f"two-forward k={k}"] = partial(AdaptiveDrafter, [2], FixedPolicy(k))
        drafters[f"one-forward k={k}"] = partial(AdaptiveDrafter, [2], FixedPolicy(k, "all"))
    rows = max(new().max_rows for new in drafters.values())
    each = -(-rounds // TURNS)
    capacity = context + 2 * (WARM_UPS + each) * (max(ks) + 1)
    runner = Runner(lm, capacity=capacity, max_rows=rows, static=True, compile=compile)
    request = Request(_prompt(lm, context))
    times: dict[str, list[float]] = {name: [] for name in drafters}
    for _ in range(TURNS):
        for name, new in drafters.items():
            # These texts are left before any draft has to be cut short.
            steps = decode(runner, [request], Drafters(new), Limits(capacity - context))
            list(islice(steps, 2 * WARM_UPS))
            for _ in range(each):
                began = clock(lm.device)
                list(islice(steps, 2 if name.startswith("two") else 1))
                times[name].append(1e3 * duration(began, clock(lm.device)))
    return {name: spread(seconds) for name, seconds in times.items()}


def _prompt(lm: PreTrainedModel, n: int) -> list[int]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, lm.config.vocab_size, (n,), generator=generator).tolist()
