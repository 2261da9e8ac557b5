"""Time the choice of tokens by native.c beside PyTorch's operations, in turns.

    python -m tests.benchmarks.choice [THREADS]

It prints medians for each setting of sampling. The logits are random, with the hidden size and vocabulary of
SmolLM2-135M, and about as far apart. Exits with status 1 without int8 or a C compiler.
"""

import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import nn

from conf.devices.int8 import exact_kernel
from infer.engine.pick import Logits, candidates, pick
from infer.engine.rounded import RoundedHead, RoundedProduct
from infer.engine.sampling import Sampling

D, V, PROBES = 576, 49_152, 5
ROUNDS, CALLS = 15, 20
SETTINGS = {
    "greedy": Sampling(),
    "temperature 1": Sampling(1.0),
    "top_p 0.95": Sampling(1.0, top_p=0.95),
    "top_k 50": Sampling(1.0, top_k=50),
}


def microseconds(call: Callable[[], object]) -> float:
    began = perf_counter()
    for _ in range(CALLS):
        call()
    return (perf_counter() - began) / CALLS * 1e6


def main(threads: int = 1) -> None:
    kernel = exact_kernel()
    if kernel is None:
        sys.exit("error: products in int8 are not exact on this CPU")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    linear = nn.Linear(D, V, bias=False)
    linear.weight *= 8
    hidden = torch.randn(PROBES, D)
    head = RoundedHead(linear)
    RoundedProduct({head: None}, kernel)
    logits = linear(hidden)
    by = {
        "native.c": Logits(head, hidden, logits),
        "PyTorch": Logits(linear, hidden, logits, narrow=True),
    }
    if by["native.c"].native is None:
        sys.exit("error: no C compiler. Install gcc, or set CC to a compiler")
    keys = torch.zeros(PROBES, dtype=torch.int64), torch.arange(PROBES)
    print("microseconds of one pick, and of 16 candidates of five probes")
    for name, sampling in SETTINGS.items():
        times: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for which, rows in by.items():
                calls = {
                    "pick": partial(pick, rows[0:1], sampling, *(k[:1] for k in keys)),
                    "candidates": partial(candidates, rows, sampling, *keys, 16),
                }
                for what, call in calls.items():
                    times.setdefault(f"{what} {which}", []).append(microseconds(call))
        columns = (f"{what} {median(values):6.0f}" for what, values in times.items())
        print(f"{name:14}", *columns)


if __name__ == "__main__":
    with torch.inference_mode():
        main(*map(int, sys.argv[1:]))
