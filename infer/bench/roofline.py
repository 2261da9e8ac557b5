"""The roofline: how fast a forward could be on this device, whatever the kernels, beside what it takes.

A forward of q rows behind n tokens of context has to read every weight once, of the embedding the rows'
own entries, and the cache; it writes the rows' keys and values. It multiplies every weight matrix with every
row, and every row's queries with the keys and values that they see. Its roofline time is that of the slower of
the two (Williams, Waterman, Patterson, 2009):

    max(bytes(q, n) / bandwidth, operations(q, n) / rate)

Not in it: activations, norms and softmax, launches, the pick and all that runs on the host, a draft model, a
gated adapter, which acts on probes alone. So a loop falls short of 100 %.

Bandwidth and rate are timed on this device, in buffers as large as the model's weights, up to a gibibyte: a
small model lives in a cache. The fastest of several bursts counts: only other work slows one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from infer.engine.cache import shape
from infer.engine.forward import windows
from infer.engine.gate import GatedEmbedding, GatedLinear
from infer.engine.output import Request
from infer.engine.runner import Runner, duration
from infer.engine.sampling import GREEDY
from infer.trees.tree import Tree

ROWS = (1, 2, 4, 8, 16, 32)  # q of the measured forwards
CONTEXT = 256  # tokens behind which they are measured
ROUNDS = 9
SECONDS = 0.3  # of each figure's measurement, more or less
BURST = 0.004  # seconds on end
BURSTS = 5  # at least
LARGEST = 2**30  # bytes of a buffer: larger than any cache
PRODUCT_ROWS = 512  # so many that the product reaches the rate of a forward that memory does not bound


@dataclass(frozen=True)
class Needs:
    """What one forward reads, writes and computes for one sequence; `windows` are the layers' own."""

    weight_bytes: int  # read once, whatever the rows
    row_bytes: int  # an entry of the embedding, and the keys and values of all layers
    weight_flops: int  # of a row with all matrices
    cache_bytes: int  # of a token in a layer
    pair_flops: int  # of a row with a token in a layer
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, lm: PreTrainedModel) -> "Needs | None":
        """Return a model's costs. None for a mixture of experts: the text decides which weights are read."""
        weights = streamed(lm)
        if any(
            weight.dim() > 2 for weight in weights
        ):  # the experts of a layer lie in one tensor
            return None
        config = lm.config
        itemsize = lm.dtype.itemsize
        cache = shape(lm.config, 1, 1)
        embedding: Any = lm.get_input_embeddings()
        kinds = windows(config)
        layers = config.num_hidden_layers
        kind_of = getattr(config, "layer_types", None) or [next(iter(kinds))] * layers
        cached = itemsize * prod(cache)
        return cls(
            weight_bytes=sum(weight.nbytes for weight in weights),
            row_bytes=cached + itemsize * embedding.weight.shape[1],
            weight_flops=2
            * sum(weight.numel() for weight in weights if weight.dim() == 2),
            cache_bytes=cached // layers,
            pair_flops=4 * config.num_attention_heads * cache[-1],
            windows=tuple(kinds[kind] for kind in kind_of),
        )

    def bytes(self, rows: float, context: float) -> float:
        """Read and written by a forward of so many rows behind so many tokens."""
        return (
            self.weight_bytes
            + rows * self.row_bytes
            + self.cache_bytes * self._seen(context)
        )

    def flops(self, rows: float, context: float) -> float:
        """Return operations (a multiplication and an addition are two); each row is held against all rows."""
        return rows * (self.weight_flops + self.pair_flops * self._seen(context + rows))

    def _seen(self, tokens: float) -> float:
        return sum(
            tokens if window is None else min(window, tokens) for window in self.windows
        )


def streamed(lm: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters that a forward reads whole: all but a gated adapter's and untied embeddings."""
    passed: set[int] = set()
    for module in lm.modules():
        if isinstance(module, nn.Embedding):
            passed |= {id(weight) for weight in module.parameters()}
        elif isinstance(module, GatedLinear):
            passed |= {id(weight) for weight in module.adapter}
        elif isinstance(module, GatedEmbedding):
            passed.add(id(module.rows))
    head = {id(weight) for weight in lm.get_output_embeddings().parameters()}
    return [
        weight
        for weight in lm.parameters()
        if id(weight) in head or id(weight) not in passed
    ]


def measure_roofline(lm: PreTrainedModel) -> dict[str, Any]:
    """Return milliseconds of a forward of each of ROWS rows, measured and by the roofline.

    The roofline's are None for a mixture of experts, whose text decides which weights are read.
    """
    needs = Needs.of(lm)
    limits: list[float] | None = None
    if needs:
        bandwidth = measure_bandwidth(lm.device, size=min(needs.weight_bytes, LARGEST))
        rate = measure_rate(lm)
        limits = [
            1e3
            * max(needs.bytes(q, CONTEXT) / bandwidth, needs.flops(q, CONTEXT) / rate)
            for q in ROWS
        ]
    return {
        "rows": list(ROWS),
        "context": CONTEXT,
        "ms": measure_forwards(lm),
        "roofline_ms": limits,
    }


def measure_forwards(lm: PreTrainedModel) -> list[float]:
    """Return the median milliseconds of a forward of each of ROWS rows, its picks on the host."""
    runner = Runner(lm, capacity=CONTEXT, max_rows=ROWS[-1])
    vocabulary = lm.config.get_text_config().vocab_size
    runner.prefill(
        [[(13 + 7919 * index) % vocabulary for index in range(CONTEXT - ROWS[-1])]]
    )
    times: dict[int, list[float]] = {q: [] for q in ROWS}
    for turn in range(1 + ROUNDS):
        for q in ROWS:
            began = time.perf_counter()
            tree = Tree.chain(1, [1] * (q - 1))
            tree.walk(runner.forward([tree], [Request([1])], GREEDY).chooser(0, ()))
            if turn:  # the first warms up
                times[q].append(1e3 * duration(began, time.perf_counter()))
    return [median(times[q]) for q in ROWS]


def measure_rate(lm: PreTrainedModel) -> float:
    """Return the operations per second of a product with the largest matrix of a layer."""
    # The head is the largest matrix of a small model, and of an odd shape.
    head: Any = lm.get_output_embeddings()
    layers = (
        weight.shape
        for weight in streamed(lm)
        if weight.dim() == 2 and weight is not head.weight
    )
    matrix = max(layers, key=prod)
    weight = torch.randn(*matrix, dtype=lm.dtype, device=lm.device)
    rows = torch.randn(PRODUCT_ROWS, matrix[1], dtype=lm.dtype, device=lm.device)
    return (
        2
        * PRODUCT_ROWS
        * prod(matrix)
        / seconds_of(lambda: F.linear(rows, weight), lm.device)
    )


def measure_bandwidth(device: torch.device, *, size: int) -> float:
    """Return bytes per second within `size` bytes: the faster of copying one half and of reading all."""
    buffer = torch.ones(max(2, size // 8 * 2), dtype=torch.int32, device=device)
    source, target = buffer.chunk(2)
    tasks: list[Callable[[], Any]] = [
        lambda: target.copy_(source),
        lambda: buffer.amax(),
    ]
    return buffer.nbytes / min(seconds_of(task, device) for task in tasks)


@torch.inference_mode()
def seconds_of(task: Callable[[], Any], device: torch.device) -> float:
    """Measure the seconds of a call among its like, so many on end that neither clock nor launch counts."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def burst(calls: int) -> float:
        began = clock()
        for _ in range(calls):
            task()
        return duration(began, clock())

    task()  # warms up
    calls = 1
    while (seconds := burst(calls)) < BURST:
        calls *= 2
    return min(burst(calls) for _ in range(max(BURSTS, int(SECONDS / seconds)))) / calls
