"""The type of weights that suits a device: `dtype=auto` chooses by measurement.

A CPU without AVX512-BF16 or AMX multiplies bfloat16 matrices up to 70 times more slowly than float32 ones.
"""

import time
from functools import cache

from conf.console import print_once

AUTO = "auto"
# A given bfloat16 is warned of where it takes so many times as long as float32.
SLOW = 10
# of the product that is timed; a single row is as slow in both types
ROWS = 64
WIDTH = 512
ROUNDS = 3


def choose_dtype(requested: str, device: str | None = None) -> str:
    """Return the dtype for `requested`; "auto" is bfloat16 where the device is as fast in it as in float32.

    `device` is None for a GPU where there is one. The first rank prints what auto took, and warns of a given
    bfloat16 that the CPU computes ten times more slowly.
    """
    import torch  # late: settings are read without it

    if requested not in (AUTO, "bfloat16"):
        return requested
    on_cpu = not torch.cuda.is_available() if device is None else device == "cpu"
    if not on_cpu:
        native = requested != AUTO or torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        return "bfloat16" if native else "float32"
    cost = bfloat16_cost()
    chosen = requested
    if requested == AUTO:
        chosen = "bfloat16" if cost <= 1 else "float32"
        print_once(
            f"dtype=auto: {chosen} (bfloat16 takes {cost:.2g} times as long as float32 on this CPU)",
            error=True,
        )
    elif cost >= SLOW:
        print_once(
            f"warning: dtype=bfloat16 takes {cost:.2g} times as long as float32 on this CPU. Use dtype=auto",
            error=True,
        )
    return chosen


@cache
def bfloat16_cost() -> float:
    """Return how many times as long as in float32 this CPU takes for a product of matrices in bfloat16."""
    return _seconds("bfloat16") / _seconds("float32")


def _seconds(name: str) -> float:
    import torch
    from torch.nn import functional

    dtype = getattr(torch, name)
    rows = torch.ones(ROWS, WIDTH, dtype=dtype)
    weight = torch.ones(WIDTH, WIDTH, dtype=dtype)
    functional.linear(rows, weight)  # the first call prepares the kernel
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        functional.linear(rows, weight)
        times.append(time.perf_counter() - began)
    return min(times)
