"""A forward in few fixed shapes, on CUDA each captured once as a graph.

A small forward on a GPU is mostly launches: a graph replays a thousand kernels for the price of one, with the
shapes and addresses that it was captured with. So rows and columns are filled up to buckets, the masks are
made on the device, and everything from the tokens to the picks is in the graph: one copy there, one copy back.

    B sequences, D rows of drafts and P of probes (q = D + P), n columns of cache in use, V tokens

A row that fills up sees the cache and itself; what it writes lies behind its sequence's tree. A sequence that
fills up has an empty cache, whose columns nobody uses.
"""

import warnings
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infer.engine.attention import biased
from infer.engine.forward import Target, shares
from infer.engine.output import (
    ForwardOutput,
    LazyOutput,
    Packed,
    PackedOutput,
    Request,
    on_host,
)
from infer.engine.pick import Logits, leaders, likeliest, pick
from infer.engine.sampling import Sampling
from infer.trees.tree import Fed, FlatTrees, Tree, extent, flatten

COLUMNS = 256  # of cache, the smallest bucket
WIDTH = 16  # leaders of every probe that are brought over
WARM_UPS = 3
CAPTURES = Lock()  # before one begins the device is synchronized, which ends any other
SAMPLINGS = 8  # whose graphs are kept: each has its temperature in it, and the caller may know any number


class Shape(NamedTuple):
    """What a graph is captured for."""

    sequences: int
    drafts: int
    probes: int
    width: int  # columns of the tree: its rows, and the nodes fed before
    columns: int
    sampling: Sampling
    keeps_logits: bool  # for picks that are made on the host
    draws: bool  # what may follow every row, for a draft model, instead of picks


def fixed_shapes(lm: PreTrainedModel) -> bool:
    """Return whether a model's control flow depends on no data, as the library says, and it is whole here."""
    return lm._can_compile_fullgraph and shares(lm) == 1


class CompileWarning(UserWarning):
    """torch.compile failed: forwards go on as graphs of the library's own kernels."""


class Compiled:
    """A function by torch.compile, and by itself from the first failure on, which is a CompileWarning."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._failed = False
        self._compiled = torch.compile(function, fullgraph=True, dynamic=True)

    def __call__(self, *args: Any) -> Tensor:
        """Call the compiled function, or the function itself after a failure."""
        if not self._failed:
            try:
                return self._compiled(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # those of Dynamo, Inductor, Triton and a C compiler share no class
                self._failed = True
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                warnings.warn(
                    f"compile=true failed ({why}): going on without it",
                    CompileWarning,
                    stacklevel=2,
                )
        return self._function(*args)


class StaticForward:
    """A graph for every shape, made on its first use; all share one pool of memory."""

    def __init__(self, target: Target, *, batch: int, compile: bool = False) -> None:
        self.target = target
        self._batch = batch
        self.hidden: Callable[..., Tensor] = target.hidden
        if compile:
            # One row and one sequence are compiled by themselves, for each model: more than PyTorch expects.
            torch._dynamo.config.recompile_limit = 64
            self.hidden = Compiled(target.hidden)
        # PyTorch's own stream for captures is on the current device, which need not be the model's.
        self.stream = (
            torch.cuda.Stream(target.device) if target.device.type == "cuda" else None
        )
        self.pool = torch.cuda.graph_pool_handle() if self.stream else None
        self._graphs: dict[Sampling, dict[Shape, Graph]] = {}

    @staticmethod
    def room(capacity: int, max_rows: int, batch: int) -> int:
        """Return rows of the cache that sequences of `capacity` tokens and the trees behind them take."""
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
        drafts, probes = map(bucket, extent(trees, fed))
        idle = min(bucket(len(trees)), self._batch) - len(trees)
        lengths = [*target.cache.lengths, *[0] * idle]
        before = [*(fed or [0] * len(trees)), *[0] * idle]
        width = (
            bucket(max(before) + drafts + probes) if max(before) else drafts + probes
        )
        flat = flatten(
            [*trees, *[Tree.chain(0)] * idle],
            lengths,
            fed=before,
            drafts=drafts,
            probes=probes,
            width=width,
        )
        columns = COLUMNS * bucket(-(-(max(lengths) + width) // COLUMNS))
        columns = min(columns, target.cache.capacity)
        keeps = any(map(on_host, trees, requests))
        shape = Shape(
            len(lengths),
            drafts,
            probes,
            width,
            columns,
            sampling,
            keeps,
            fed is not None,
        )
        self._graphs[sampling] = graphs = self._graphs.pop(sampling, {})
        if len(self._graphs) > SAMPLINGS:
            del self._graphs[
                next(iter(self._graphs))
            ]  # of the sampling unused for longest
        if shape not in graphs:
            graphs[shape] = Graph(shape, self)
        graph = graphs[shape]
        packed = graph.run(
            flat, lengths, [*(request.seed for request in requests), *[0] * idle]
        )
        if graph.logits is None:
            return PackedOutput(packed, flat, trees, requests)
        lazy = LazyOutput(graph.logits, flat, trees, requests, sampling, target.agree)
        return PackedOutput(packed, flat, trees, requests, lazy)


class Graph:
    """One shape's buffers and, on CUDA, its kernels."""

    def __init__(self, shape: Shape, way: StaticForward) -> None:
        self._shape = shape
        self._target = way.target
        self._hidden = way.hidden
        self._stream = way.stream
        self._pool = way.pool
        rows = shape.drafts + shape.probes
        self._inputs = Inputs(shape.sequences, rows, shape.width, way.target.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._width = 0  # leaders of a row
        self._packed: Tensor | None = None
        self.logits: Logits | None = None  # of the last run, where they are kept

    def run(
        self, flat: FlatTrees, lengths: Sequence[int], seeds: Sequence[int]
    ) -> Packed:
        """Return the picks and leaders of these rows, on the host."""
        self._inputs.fill(flat, lengths, seeds)
        if self._stream is None:
            self._packed = self._compute()
        else:
            if self._graph is None:
                self._graph = self._capture(self._stream)
            self._graph.replay()
        assert self._packed is not None
        B, D, P = self._shape[:3]
        picks, led = (0, D + P) if self._shape.draws else (D, P)
        return Packed.unpack(
            self._target.agree(self._packed).cpu().numpy(),
            (B, picks),
            (B, led, self._width),
        )

    def _capture(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        # Runs ahead of the capture allocate what libraries keep, and compile. They write what the
        # replay will write again.
        current = torch.cuda.current_stream(self._target.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._compute()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate and wait meanwhile: by default that ends a capture.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        )
        with CAPTURES, capture:
            self._packed = self._compute()
        return graph

    def _compute(self) -> Tensor:
        """Compute one float64 tensor from the inputs, in which ids are exact too."""
        D = self._shape.drafts
        P = self._shape.probes
        n = self._shape.columns
        sampling = self._shape.sampling
        target = self._target
        given = self._inputs
        q = D + P
        target.cache.place_each(given.lengths + given.fed, rows=q, end=n)
        more = target.dtype, target.slopes
        masks = {
            kind: additive_mask(given, n, window, *more)
            for kind, window in target.windows.items()
        }
        with target.gate.open(D, q):
            hidden = self._hidden(given.ids, given.positions, masks)
        logits = target.head(hidden)
        if self._shape.keeps_logits:
            self.logits = Logits(
                target.head, hidden.flatten(0, 1), logits.flatten(0, 1)
            )

        def rows(which: slice) -> tuple[Logits, Sampling, Tensor, Tensor]:
            logits_of = Logits(
                target.head,
                hidden[:, which].flatten(0, 1),
                logits[:, which].flatten(0, 1),
            )
            places = given.positions[:, which] + 1
            return (
                logits_of,
                sampling,
                places.flatten(),
                given.seeds[:, None].expand_as(places).flatten(),
            )

        parts = []
        if not self._shape.draws:
            parts.append(pick(*rows(slice(0, D))))
        if P or self._shape.draws:
            behind = likeliest if self._shape.draws else leaders
            scores, ids = behind(*rows(slice(0 if self._shape.draws else D, q)), WIDTH)
            self._width = ids.shape[1]
            parts += [ids.flatten(), scores.flatten()]
        return torch.cat([part.double() for part in parts])


class Inputs:
    """What a forward takes from the host, in one buffer: `ids` and `positions` (B, q), `places` (B, w),
    `seeds`, `lengths` and `fed` (B,), all int64, and `seen` (B, q, w) bool.
    """

    def __init__(
        self, sequences: int, rows: int, width: int, device: torch.device
    ) -> None:
        self._sequences = sequences
        self._rows = rows
        self._width = width
        size = 8 * sequences * (2 * rows + width + 3) + sequences * rows * width
        self._host = torch.zeros(
            size, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._views = [view.numpy() for view in self._split(self._host)]
        self.ids, self.positions, self.places, *each, self.seen = self._split(
            self._device
        )
        self.seeds, self.lengths, self.fed = each

    def fill(
        self, flat: FlatTrees, lengths: Sequence[int], seeds: Sequence[int]
    ) -> None:
        """Bring these over, in one copy; the last one must have been used."""
        values = (
            flat.ids,
            flat.positions,
            flat.places,
            seeds,
            lengths,
            flat.fed,
            flat.seen,
        )
        for view, value in zip(self._views, values):
            view[...] = value
        self._device.copy_(self._host, non_blocking=True)

    def _split(self, buffer: Tensor) -> list[Tensor]:
        B = self._sequences
        q = self._rows
        w = self._width
        sizes = (B * q, B * q, B * w, B, B, B)
        ids, positions, places, *each = (
            buffer[: 8 * sum(sizes)].view(torch.int64).split(sizes)
        )
        seen = buffer[8 * sum(sizes) :].view(torch.bool)
        return [
            ids.view(B, q),
            positions.view(B, q),
            places.view(B, w),
            *each,
            seen.view(B, q, w),
        ]


def additive_mask(
    given: Inputs,
    columns: int,
    window: int | None,
    dtype: torch.dtype,
    slopes: Tensor | None = None,
) -> Tensor:
    """Return (B, 1, q, columns): `trees.tree.mask` on the device, 0 where a row attends, else -inf. With
    slopes (B, H, q, columns), see attention.py.
    """
    q, w = given.seen.shape[1:]
    column = torch.arange(columns, device=given.ids.device)
    behind = (
        column - given.lengths[:, None]
    )  # (B, columns): which of the tree's columns it is, if any
    own = behind.clamp(0, w - 1)
    among = (
        given.seen.gather(2, own[:, None].expand(-1, q, -1))
        & ((behind >= 0) & (behind < w))[:, None]
    )
    attends = among | (behind < 0)[:, None]
    places = torch.where(behind < 0, column, given.places.gather(1, own))
    if window is not None:
        attends &= places[:, None] > given.positions[..., None] - window
    if slopes is not None:
        return biased(attends[:, None], places, slopes, dtype)
    return torch.zeros_like(attends, dtype=dtype).masked_fill(~attends, float("-inf"))[
        :, None
    ]


def bucket(n: int) -> int:
    """Return the smallest of 0, 1, 2, 4, 8, ... that is at least n: few shapes mean few captures."""
    return 1 << (n - 1).bit_length() if n else 0
