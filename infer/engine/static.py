"""A forward in a few fixed shapes. On CUDA each shape is captured once as a graph.

Most of the time of a small forward on a GPU is kernel launches. A graph replays a thousand
kernels at the cost of one launch, with the shapes and addresses of its capture. So rows and
columns are padded to buckets, and masks are computed on the device. The graph contains all
steps from tokens to picks, between one copy to the device and one copy back.

    B sequences, D rows of drafts and P of probes (q = D + P), n columns of cache in use

A padding row attends to the cache and to itself, and is written after its sequence's tree.
A padding sequence has an empty cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from infer.engine.forward import Target, additive, shares
from infer.engine.output import (
    ForwardOutput,
    LazyOutput,
    PackedOutput,
    Request,
    needs_logits,
)
from infer.engine.pick import Logits, candidates, likeliest, pick
from infer.engine.sampling import Sampling
from infer.trees.tree import Fed, FlatTrees, Tree, extent, flatten

COLUMNS = 256  # the smallest bucket of cache columns
WIDTH = 16  # candidates of a row that are copied to the host
WARM_UPS = 3
#: Held during a capture: a capture synchronizes the device, which would end another capture.
CAPTURES = Lock()
#: The maximum number of graphs; a planner needs about 40 for each temperature.
GRAPHS = 256


@dataclass(frozen=True)
class Shape:
    """The shape that a graph is captured for."""

    sequences: int
    drafts: int
    probes: int
    width: int  # columns of the tree: its rows and the nodes that were fed before
    columns: int  # columns of the cache in use
    sampling: Sampling
    keeps_logits: bool  # return logits, so that the host computes the picks
    draft_model: bool  # return candidates after every row instead of picks


def fixed_shapes(lm: PreTrainedModel) -> bool:
    """Return True if CUDA graphs can replay the model's forward.

    Its control flow must not depend on data, and it must not be divided over several GPUs.
    """
    return lm._can_compile_fullgraph and shares(lm) == 1


class StaticForward:
    """A forward that replays a graph for each shape, captured on first use.

    All graphs share one memory pool.
    """

    def __init__(self, target: Target, *, batch: int, compile: bool = False) -> None:
        self.target = target
        self._batch = batch
        self.hidden: Callable[..., Tensor] = target.hidden
        if compile:
            # One row and one sequence compile to special versions, more than the default limit.
            torch._dynamo.config.recompile_limit = 64
            self.hidden = torch.compile(target.hidden, fullgraph=True, dynamic=True)
        # PyTorch's default stream for captures is on the current device, not on the model's.
        cuda = target.device.type == "cuda"
        self.stream = torch.cuda.Stream(target.device) if cuda else None
        self.pool = torch.cuda.graph_pool_handle() if cuda else None
        self._graphs: dict[Shape, Graph] = {}  # in order of last use

    @staticmethod
    def cache_rows(capacity: int, max_rows: int, batch: int) -> int:
        """Return the number of cache rows for `capacity` tokens and a padded tree, in buckets."""
        return -(-(capacity + 2 * bucket(max_rows)) // COLUMNS) * COLUMNS

    def __call__(
        self,
        trees: Sequence[Tree],
        requests: Sequence[Request],
        sampling: Sampling,
        fed: Fed = None,
    ) -> ForwardOutput:
        """See DynamicForward."""
        target = self.target
        padding = min(bucket(len(trees)), self._batch) - len(trees)
        lengths = [*target.cache.lengths, *[0] * padding]
        before = [*(fed or [0] * len(trees)), *[0] * padding]
        drafts, probes = map(bucket, extent(trees, fed))
        width = drafts + probes
        if any(before):
            width = bucket(max(before) + width)
        flat = flatten(
            [*trees, *[Tree.chain(0)] * padding],
            lengths,
            fed=before,
            drafts=drafts,
            probes=probes,
            width=width,
        )
        columns = COLUMNS * bucket(-(-(max(lengths) + width) // COLUMNS))
        shape = Shape(
            sequences=len(lengths),
            drafts=drafts,
            probes=probes,
            width=width,
            columns=min(columns, target.cache.capacity),
            sampling=sampling,
            keeps_logits=any(map(needs_logits, trees, requests)),
            draft_model=fed is not None,
        )
        graph = self._graphs.pop(shape, None) or Graph(shape, self)
        self._graphs[shape] = graph
        if len(self._graphs) > GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        seeds = [*(request.seed for request in requests), *[0] * padding]
        packed = graph.run(flat, lengths, seeds)
        if shape.keeps_logits:
            logits = graph.logits
            assert logits is not None
            return LazyOutput(
                logits, flat, trees, requests, sampling, target.agree, target.correction
            )
        return unpack(target.agree(packed), shape, flat, trees, target)


class Graph:
    """The buffers of one shape and, on CUDA, its captured graph."""

    def __init__(self, shape: Shape, forward: StaticForward) -> None:
        self._shape = shape
        self._target = forward.target
        self._hidden = forward.hidden
        self._stream = forward.stream
        self._pool = forward.pool
        self._inputs = Inputs(shape, forward.target.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._packed = torch.empty(0)
        self.logits: Logits | None = None  # of the last run, if `shape.keeps_logits`

    def run(
        self, flat: FlatTrees, lengths: Sequence[int], seeds: Sequence[int]
    ) -> Tensor:
        """Compute these rows; return picks, ids and weights in one tensor, see `unpack`."""
        self._inputs.fill(flat, lengths, seeds)
        if self._stream is None:
            self._packed = self._compute()
        else:
            if self._graph is None:
                self._graph = self._capture(self._stream)
            self._graph.replay()
        return self._packed

    def _capture(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        # Runs before the capture let libraries allocate and compile. They write cache rows
        # that the replay overwrites.
        current = torch.cuda.current_stream(self._target.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._compute()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # In the default mode, another thread that allocates or waits would end the capture.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        )
        with CAPTURES, capture:
            self._packed = self._compute()
        return graph

    def _compute(self) -> Tensor:
        """Compute one tensor from the inputs, in float64, which represents ids exactly."""
        shape = self._shape
        target = self._target
        inputs = self._inputs
        q = shape.drafts + shape.probes
        starts = inputs.lengths + inputs.fed
        target.cache.set_slots_at(starts, rows=q, end=shape.columns)
        masks = {
            kind: additive_mask(inputs, shape.columns, window, target.mask_dtype)
            for kind, window in target.windows.items()
        }
        with target.gate.open(shape.drafts, q):
            hidden = self._hidden(inputs.ids, inputs.positions, masks)
        logits: Tensor = target.head(hidden)
        if shape.keeps_logits:
            self.logits = Logits(
                target.head, hidden.flatten(0, 1), logits.flatten(0, 1)
            )
            return logits.new_empty(0)

        def rows(first: int, end: int) -> tuple[Logits, Sampling, Tensor, Tensor]:
            positions = inputs.positions[:, first:end] + 1
            seeds = inputs.seeds[:, None].expand_as(positions)
            selected = Logits(
                target.head,
                hidden[:, first:end].flatten(0, 1),
                logits[:, first:end].flatten(0, 1),
            )
            return selected, shape.sampling, positions.flatten(), seeds.flatten()

        parts: list[Tensor] = []
        if shape.draft_model:
            parts += likeliest(*rows(0, q), WIDTH)
        else:
            picks = pick(*rows(0, shape.drafts))
            if shape.probes:
                finite = hidden[:, : shape.drafts].isfinite().all(-1).flatten()
                picks = picks.where(finite, -1)
            parts.append(picks)
            if shape.probes:
                parts += candidates(*rows(shape.drafts, q), WIDTH)
                if target.correction:
                    parts.append(hidden[:, shape.drafts :])
        return torch.cat([part.double().flatten() for part in parts])


def unpack(
    packed: Tensor,
    shape: Shape,
    flat: FlatTrees,
    trees: Sequence[Tree],
    target: Target,
) -> PackedOutput:
    """Split `packed` into a graph's picks, ids and weights.

    With a previous-token head the probes' hidden states follow; they stay on the device.
    """
    B = shape.sequences
    drafts = 0 if shape.draft_model else shape.drafts
    rows = shape.probes + (shape.drafts if shape.draft_model else 0)
    head = target.correction if shape.probes else None
    hidden = None
    if head:
        packed, states = packed.tensor_split([len(packed) - B * rows * head.width])
        hidden = states.view(B, rows, head.width).to(target.dtype)
    numbers = packed.cpu().numpy()
    picks, rest = np.split(numbers, [B * drafts])
    width = len(rest) // (2 * B * rows) if rows else 0
    ids, weights = rest.reshape(2, B, rows, width)
    picks = picks.astype(np.int64).reshape(B, drafts)
    return PackedOutput(picks, ids.astype(np.int64), weights, flat, trees, head, hidden)


class Inputs:
    """The inputs of a forward in one buffer.

    `ids` and `positions` (B, q), `column_positions` (B, w), `seeds`, `lengths` and `fed`
    (B,) are int64; `attends` (B, q, w) is bool.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        B = shape.sequences
        q = shape.drafts + shape.probes
        w = shape.width
        self._shapes = [(B, q), (B, q), (B, w), (B,), (B,), (B,)]
        self._attends_shape = (B, q, w)
        size = 8 * B * (2 * q + w + 3) + B * q * w
        pinned = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._views = [view.numpy() for view in self._split(self._host)]
        (
            self.ids,
            self.positions,
            self.column_positions,
            self.seeds,
            self.lengths,
            self.fed,
            self.attends,
        ) = self._split(self._device)

    def fill(
        self, flat: FlatTrees, lengths: Sequence[int], seeds: Sequence[int]
    ) -> None:
        """Copy the inputs to the device at once. The previous forward must have finished."""
        values = (
            flat.ids,
            flat.positions,
            flat.column_positions,
            seeds,
            lengths,
            flat.fed,
            flat.attends,
        )
        for view, value in zip(self._views, values):
            view[...] = value
        self._device.copy_(self._host, non_blocking=True)

    def _split(self, buffer: Tensor) -> list[Tensor]:
        sizes = [torch.Size(shape).numel() for shape in self._shapes]
        integers = buffer[: 8 * sum(sizes)].view(torch.int64).split(sizes)
        views = [part.view(shape) for part, shape in zip(integers, self._shapes)]
        attends = buffer[8 * sum(sizes) :].view(torch.bool)
        return [*views, attends.view(self._attends_shape)]


def additive_mask(
    inputs: Inputs, columns: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Return the mask (B, 1, q, columns): 0 where a row attends and -inf elsewhere.

    It equals `trees.tree.mask`, computed on the device.
    """
    q, w = inputs.attends.shape[1:]
    column = torch.arange(columns, device=inputs.ids.device)
    offset = column - inputs.lengths[:, None]  # (B, columns), into the tree's columns
    in_tree = (offset >= 0) & (offset < w)
    offset_in_tree = offset.clamp(0, w - 1)
    attends = inputs.attends.gather(2, offset_in_tree[:, None].expand(-1, q, -1))
    attends = (attends & in_tree[:, None]) | (offset < 0)[:, None]
    if window is not None:
        own = inputs.column_positions.gather(1, offset_in_tree)
        positions = torch.where(offset < 0, column, own)
        attends &= positions[:, None] > inputs.positions[..., None] - window
    return additive(attends, dtype)[:, None]


def bucket(n: int) -> int:
    """Return the smallest of 0, 1, 2, 4, 8, ... that is at least n."""
    return 1 << (n - 1).bit_length() if n else 0
