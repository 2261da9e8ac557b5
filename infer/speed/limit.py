"""The physical limit: how fast a forward could be on this device, whatever the kernels. Pure arithmetic.

A forward of q rows behind n tokens of context has to read every weight once, of the embedding the rows'
own entries, and the cache; it writes the rows' keys and values. It multiplies every weight matrix with every
row, and every row's queries with the keys and values that they see. Its roofline time is that of the slower of
the two (Williams, Waterman, Patterson, 2009):

    max(bytes(q, n) / bandwidth, operations(q, n) / rate)

Not in it: activations, norms and softmax, launches, the pick and all that runs on the host, a draft model, a
gated adapter, which acts on probes alone. So a loop falls short of 100 %.

Bytes copied and read, and operations are timed on this device. Buffers are as large as a model's weights, up to
a gibibyte: a small model lives in a cache. The fastest of several bursts counts: only other work slows one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from infer.engine.cache import shape
from infer.engine.forward import windows
from infer.engine.gate import GatedEmbedding, GatedLinear
from infer.engine.runner import duration
from infer.measure.runs import clock

ROWS = tuple(2**power for power in range(11))  # of the table


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
        if any(weight.dim() > 2 for weight in weights):  # the experts of a layer lie in one tensor
            return None
        config, itemsize, cache = lm.config, lm.dtype.itemsize, shape(lm.config, 1, 1)
        embedding: Any = lm.get_input_embeddings()
        kinds, layers = windows(config), config.num_hidden_layers
        kind_of = getattr(config, "layer_types", None) or [next(iter(kinds))] * layers
        cached = itemsize * prod(cache)
        return cls(
            weight_bytes=sum(weight.nbytes for weight in weights),
            row_bytes=cached + itemsize * embedding.weight.shape[1],
            weight_flops=2 * sum(weight.numel() for weight in weights if weight.dim() == 2),
            cache_bytes=cached // layers,
            pair_flops=4 * config.num_attention_heads * cache[-1],
            windows=tuple(kinds[kind] for kind in kind_of),
        )

    def bytes(self, rows: float, context: float) -> float:
        """Read and written by a forward of so many rows behind so many tokens."""
        return self.weight_bytes + rows * self.row_bytes + self.cache_bytes * self._seen(context)

    def flops(self, rows: float, context: float) -> float:
        """Return operations (a multiplication and an addition are two); each row is held against all rows."""
        return rows * (self.weight_flops + self.pair_flops * self._seen(context + rows))

    def _seen(self, tokens: float) -> float:
        return sum(tokens if window is None else min(window, tokens) for window in self.windows)


@dataclass(frozen=True)
class Limit:
    """The roofline of a model on a device, in the model's dtype and at its size.

    `copy` and `read` are bytes per second, of a copy both those read and those written.
    """

    dtype: str
    needs: Needs
    copy: float
    read: float
    flops: float  # per second

    def seconds(self, rows: float, context: float) -> float:
        """Return the seconds of a forward. The faster of copying and reading is what the memory can do."""
        by_memory = self.needs.bytes(rows, context) / max(self.copy, self.read)
        return max(by_memory, self.needs.flops(rows, context) / self.flops)

    def describe(self, context: int) -> dict[str, Any]:
        """Describe the limit for the report; the table is of forwards behind `context` tokens, in ms."""
        return {
            "dtype": self.dtype,
            "weights_bytes": self.needs.weight_bytes,
            "copy_bytes_per_second": self.copy,
            "read_bytes_per_second": self.read,
            "flops_per_second": self.flops,
            "context": context,
            "forward_ms": [[rows, 1e3 * self.seconds(rows, context)] for rows in ROWS],
        }


def streamed(lm: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters that a forward reads whole: all but a gated adapter's and untied embeddings."""
    passed = set[int]()
    for module in lm.modules():
        if isinstance(module, nn.Embedding):
            passed |= {id(weight) for weight in module.parameters()}
        elif isinstance(module, GatedLinear):
            passed |= {id(weight) for weight in module.adapter}
        elif isinstance(module, GatedEmbedding):
            passed.add(id(module.rows))
    head = {id(weight) for weight in lm.get_output_embeddings().parameters()}
    return [weight for weight in lm.parameters() if id(weight) in head or id(weight) not in passed]


SECONDS = 0.3  # of each figure's measurement, more or less
BURST = 0.004  # seconds on end
LEAST = 5  # bursts
MOST = 2**30  # bytes of a buffer: larger than any cache, and there may be no room for the weights twice
DEVICE_ROWS = 512  # of the product: many, so that it reaches the rate of a forward that memory does not bound


def measure_limit(lm: PreTrainedModel) -> Limit | None:
    """Return the roofline of a model where it lies, in a second or two. None for a mixture of experts."""
    needs = Needs.of(lm)
    if needs is None:
        return None
    speeds = bandwidth(lm.device, size=min(needs.weight_bytes, MOST))
    # The head is the largest matrix of a small model, and of an odd shape.
    head = lm.get_output_embeddings().weight
    layers = (weight.shape for weight in streamed(lm) if weight.dim() == 2 and weight is not head)
    matrix = max(layers, key=prod)
    weight = torch.randn(*matrix, dtype=lm.dtype, device=lm.device)
    rows = torch.randn(DEVICE_ROWS, matrix[1], dtype=lm.dtype, device=lm.device)
    rate = 2 * DEVICE_ROWS * prod(matrix) / seconds_of(lambda: F.linear(rows, weight))
    return Limit(str(lm.dtype).removeprefix("torch."), needs, **speeds, flops=rate)


def bandwidth(device: torch.device, *, size: int) -> dict[str, float]:
    """Return bytes per second within `size` bytes: of copying one half to the other, and of reading all."""
    buffer = torch.ones(max(2, size // 8 * 2), dtype=torch.int32, device=device)
    source, target = buffer.chunk(2)
    tasks = {"copy": lambda: target.copy_(source), "read": lambda: buffer.amax()}
    return {name: buffer.nbytes / seconds_of(task) for name, task in tasks.items()}


@torch.inference_mode()
def seconds_of(task: Callable[[], Any]) -> float:
    """Measure the seconds of a call among its like, so many on end that neither clock nor launch counts."""

    def burst(calls: int) -> float:
        began = clock()
        for _ in range(calls):
            task()
        return duration(began, clock())

    task()  # warms up
    calls = 1
    while (seconds := burst(calls)) < BURST:
        calls *= 2
    return min(burst(calls) for _ in range(max(LEAST, int(SECONDS / seconds)))) / calls
