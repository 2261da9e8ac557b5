"""What this device does at best: bytes copied and read, and operations, against the clock.

Buffers are as large as a model's weights, up to a gibibyte: a small model lives in a cache, and is held against
that. A call is timed among its like, so many on end that neither the clock nor a launch counts. The fastest of
such bursts is taken: only other work slows one, and a limit that was measured in a bad moment of the machine
would be passed in a better one.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from conf.clock import duration
from infer.measure.runs import clock
from infer.speed.limit import Limit, Needs, Speeds, streamed

SECONDS = 0.3  # of each figure's measurement, more or less
BURST = 0.004  # seconds on end
LEAST = 5  # bursts
MOST = 2**30  # bytes of a buffer: larger than any cache, and there may be no room for the weights twice
ROWS = 512  # of the product: many, so that it reaches the rate of a forward that memory does not bound


def measure_limit(lm: PreTrainedModel) -> Limit | None:
    """The roofline of a model where it lies, in a second or two. None for a mixture of experts."""
    needs = Needs.of(lm)
    if needs is None:
        return None
    speeds = bandwidth(lm.device, size=min(needs.weight_bytes, MOST))
    # The head is the largest matrix of a small model, and of an odd shape.
    head = lm.get_output_embeddings().weight
    layers = (weight.shape for weight in streamed(lm) if weight.dim() == 2 and weight is not head)
    matrix = max(layers, key=math.prod)
    rate = matmul_rate(matrix, dtype=lm.dtype, device=lm.device)
    return Limit(str(lm.dtype).removeprefix("torch."), needs, Speeds(**speeds, flops=rate))


def bandwidth(device: torch.device, *, size: int) -> dict[str, float]:
    """Bytes per second within `size` bytes: of a copy of one half to the other, both those read and those
    written, and of reading all.
    """
    buffer = torch.ones(max(2, size // 8 * 2), dtype=torch.int32, device=device)
    source, target = buffer.chunk(2)
    tasks = {"copy": lambda: target.copy_(source), "read": lambda: buffer.amax()}
    return {name: buffer.nbytes / seconds_of(task) for name, task in tasks.items()}


def matmul_rate(matrix: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of ROWS rows times a matrix (out, in)."""
    weight = torch.randn(*matrix, dtype=dtype, device=device)
    rows = torch.randn(ROWS, matrix[1], dtype=dtype, device=device)
    return 2 * ROWS * math.prod(matrix) / seconds_of(lambda: F.linear(rows, weight))


@torch.inference_mode()
def seconds_of(task: Callable[[], Any]) -> float:
    """Of a call among its like."""
    task()  # warms up
    calls = 1
    while (burst := calls * _seconds(task, calls)) < BURST:
        calls *= 2
    bursts = max(LEAST, int(SECONDS / burst))
    return min(_seconds(task, calls) for _ in range(bursts))


def _seconds(task: Callable[[], Any], calls: int) -> float:
    began = clock()
    for _ in range(calls):
        task()
    return duration(began, clock()) / calls
