"""Measure the roofline: the time of a forward, and its lower bound on this device.

A forward of q rows reads the matrices of all linear layers once and multiplies each by q
rows. So it takes at least (Williams, Waterman, Patterson, 2009)

    max(bytes of the matrices / bandwidth, 2 q entries of the matrices / rate)

The bound leaves out attention, norms, launches, the choice of tokens and the experts of a
mixture. Bandwidth and rate are measured on this device, as the fastest of several blocks of
calls. The buffer is as large as the matrices, because a small model's matrices fit in a cache.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from conf.devices.dtype import INT8
from conf.devices.int8 import Kernel
from infer.engine.output import Request
from infer.engine.rounded import RoundedLinear, RoundedProduct, kernel_of
from infer.engine.runner import Runner, duration
from infer.engine.sampling import GREEDY
from infer.trees.tree import Tree

ROW_COUNTS = (1, 2, 4, 8, 16, 32)
CONTEXT = 256  # tokens before the rows
ROUNDS = 9
MIN_SECONDS = 0.2  # the minimum time of a measurement
MAX_BUFFER = 2**30  # bytes, larger than any cache
PRODUCT_ROWS = 512  # enough rows that arithmetic bounds the product, not memory


def measure_roofline(
    lm: PreTrainedModel, rows: Sequence[int] = ROW_COUNTS
) -> dict[str, Any]:
    """Return the measured milliseconds and the bound of a forward, for each number of rows."""
    linear = [module for module in lm.modules() if isinstance(module, nn.Linear)]
    matrices = {id(layer.weight): layer.weight for layer in linear}.values()
    kernel = kernel_of(lm)
    int8 = kernel is not None and kernel.dtype == INT8
    size = sum(w.numel() if int8 else w.nbytes for w in matrices)
    flops = 2 * sum(matrix.numel() for matrix in matrices)  # per row
    bandwidth = measure_bandwidth(lm.device, size=min(size, MAX_BUFFER))
    rate = measure_rate(lm.config.hidden_size, lm.dtype, lm.device, kernel)
    return {
        "rows": list(rows),
        "context": CONTEXT,
        "ms": measure_forwards(lm, rows),
        "roofline_ms": [1e3 * max(size / bandwidth, q * flops / rate) for q in rows],
    }


def measure_forwards(lm: PreTrainedModel, rows: Sequence[int]) -> list[float]:
    """Return the median milliseconds of a forward and its picks, for each number of rows."""
    runner = Runner(lm, capacity=CONTEXT, max_rows=max(rows))
    vocabulary = lm.config.get_text_config().vocab_size
    length = CONTEXT - max(rows)
    runner.prefill([[(13 + 7919 * index) % vocabulary for index in range(length)]])
    times: dict[int, list[float]] = {q: [] for q in rows}
    for round_ in range(1 + ROUNDS):
        for q in rows:
            began = time.perf_counter()
            tree = Tree.chain(1, [1] * (q - 1))
            output = runner.forward([tree], [Request([1])], GREEDY)
            tree.walk(output.chooser(0, ()))
            if round_:  # the first round warms up
                times[q].append(1e3 * duration(began, time.perf_counter()))
    return [median(times[q]) for q in rows]


def measure_rate(
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    kernel: type[Kernel] | None = None,
) -> float:
    """Return the operations per second of a product with a square matrix, perhaps rounded by `kernel`."""
    linear = nn.Linear(width, width, bias=False, dtype=dtype, device=device)
    rows = torch.randn(PRODUCT_ROWS, width, dtype=dtype, device=device)
    multiply: Callable[[Tensor], Tensor] = linear
    if kernel:
        multiply = RoundedLinear(linear)
        RoundedProduct({multiply: None}, kernel)
    seconds = seconds_of(lambda: multiply(rows))
    return 2 * PRODUCT_ROWS * width * width / seconds


def measure_bandwidth(device: torch.device, *, size: int) -> float:
    """Return the bytes per second in a buffer of `size` bytes: the faster of copying and reading."""
    buffer = torch.ones(max(2, size // 8 * 2), dtype=torch.int32, device=device)
    source, target = buffer.chunk(2)
    copying = seconds_of(lambda: target.copy_(source))
    reading = seconds_of(lambda: buffer.amax())
    return buffer.nbytes / min(copying, reading)


@torch.inference_mode()
def seconds_of(task: Callable[[], Any]) -> float:
    """Return the seconds of a call in the fastest of several blocks of calls."""
    # Imported late: it loads setuptools for half a second.
    from torch.utils.benchmark import Timer

    timer = Timer("task()", globals={"task": task}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=MIN_SECONDS).times)
