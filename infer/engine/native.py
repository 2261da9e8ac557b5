"""The decoder of fused.py in int8 with native.c: one C function between two products.

    h -> norm ─► [q|k|v] -> rotation, cache, attention ─► o -> h += o, norm ─►
         [g|u] -> silu(g) u ─► down -> h += down, norm ─► ...

A product's input is rows of integers from -127 to 127 and the largest number of each row
(`Inputs`); its output is divided by these numbers, and the next C function multiplies by them.

In these functions a row's sums have one order, whatever rows are beside it and in whatever
columns its keys are. So a row's result is the same in every forward, bit for bit, in float32.

Without a C compiler, decoding uses PyTorch's operations (fused.py).
"""

from collections.abc import Mapping, Sequence
from ctypes import CDLL
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conf.architecture import head_width
from conf.devices.int8 import exact_kernel
from conf.devices.native import library
from infer.engine.attention import ProbeGate
from infer.engine.cache import TreeCache
from infer.engine.fused import FusedDecoder, Layer, layers_of
from infer.engine.int8 import Int8Product

#: Numbers in a vector of native.c; widths must be multiples of it.
LANES = 8
#: Threads share attention of more multiplications.
DIVIDED = 2**19
#: The arguments of a C function instead of a product's output or input.
NO_OUTPUTS = (None, 0, None, None)
NO_INPUTS = (None, None, False)


class Inputs(NamedTuple):
    """The input of a product: rows (B, q, d) as the kernel reads them, and their largest numbers (B, q).

    `arguments` are the arguments of a C function that writes it.
    """

    rows: Tensor
    largest: Tensor
    arguments: tuple[int, int, bool]

    @staticmethod
    def empty(shape: Sequence[int], width: int, dtype: torch.dtype) -> "Inputs":
        """Return space for rows of `width` numbers."""
        rows, largest = torch.empty(*shape, width, dtype=dtype), torch.empty(*shape)
        rounded = dtype == torch.uint8
        return Inputs(rows, largest, (rows.data_ptr(), largest.data_ptr(), rounded))


class Outputs(NamedTuple):
    """The output of a product: rows (B, q, d'), divided by `largest` (B, q), and its bias (d',)."""

    rows: Tensor
    largest: Tensor
    bias: Tensor

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """The arguments of a C function."""
        rows, largest, bias = self
        return rows.data_ptr(), rows.shape[-1], largest.data_ptr(), bias.data_ptr()


class NativeDecoder(FusedDecoder):
    """The decoder of a view in int8 by native.c. Its masks are boolean, its cache is in float32."""

    def __init__(
        self, native: CDLL, decoder: Any, layers: list[Layer], gate: ProbeGate
    ) -> None:
        super().__init__(decoder, layers, gate, wide=True)
        kernel = exact_kernel()
        assert kernel is not None
        self._native = native
        self._type = torch.uint8 if kernel.rounded else torch.float32
        (layer, *_) = layers  # all have the same widths
        self._widths = [
            product.in_features for product in (layer.qkv, layer.o, layer.down)
        ]

    def __call__(
        self,
        ids_Bq: Tensor,
        positions_Bq: Tensor,
        masks: Mapping[str, Tensor | None],
        cache: TreeCache,
    ) -> Tensor:
        """Return hidden states (B, q, d). See FusedDecoder."""
        h = self._decoder.embed_tokens(ids_Bq)
        rotation = self._decoder.rotary_emb(h, position_ids=positions_Bq)
        assert cache.slots.end <= cache.capacity  # C does not check sizes
        columns = cache.slots.of_rows(len(ids_Bq))
        shape = len(ids_Bq), 1, ids_Bq.shape[1], cache.slots.end
        masks = {
            kind: None if mask is None else mask.expand(shape).contiguous()
            for kind, mask in masks.items()
        }
        (first, *rest) = masks.values()
        # A product reads its input before the next function writes the input of another.
        normed, attended, activated = (
            Inputs.empty(h.shape[:2], width, self._type) for width in self._widths
        )
        queries = torch.empty(*h.shape[:2], self._heads, self._width)
        y: Outputs | None = None
        for index, layer in enumerate(self._layers):
            mask = masks[layer.kind] if rest else first
            attention_norm, mlp_norm = layer.norms
            cached = cache.layers[index]
            self._add_norm(h, y, attention_norm, normed)
            y = self._product(layer.qkv, normed)
            self._store(y, rotation, layer.scaling, queries, cached, columns)
            self._attend(queries, mask, cached, columns, attended)
            y = self._product(layer.o, attended)
            self._add_norm(h, y, mlp_norm, normed)
            y = self._product(layer.gate_up, normed)
            self._activate(y, activated)
            y = self._product(layer.down, activated)
        result = torch.empty_like(h)
        self._add_norm(h, y, self._norm, result=result)
        return result

    def _product(self, product: Any, x: Inputs) -> Outputs:
        return Outputs(product.scaled(x.rows, self._gate), x.largest, product.bias)

    def _add_norm(
        self,
        h: Tensor,
        y: Outputs | None,
        norm: Any,
        x: Inputs | None = None,
        result: Tensor | None = None,
    ) -> None:
        """Add y to h in place; write the norm of h to x, to `result`, or to both."""
        self._native.add_norm(
            *_rows(h),
            *(y.arguments if y else NO_OUTPUTS),
            *(norm.weight.data_ptr(), norm.epsilon),
            result.data_ptr() if result is not None else None,
            *(x.arguments if x else NO_INPUTS),
        )

    def _activate(self, y: Outputs, x: Inputs) -> None:
        """Write silu(g) u of [g | u] to x."""
        n, width = x.largest.numel(), x.rows.shape[-1]
        self._native.gate(n, width, *y.arguments, *x.arguments)

    def _store(
        self,
        y: Outputs,
        rotation: tuple[Tensor, Tensor],
        scaling: float,
        queries: Tensor,
        cached: Any,
        columns: Tensor,
    ) -> None:
        """Rotate [q | k | v]; write the queries, times `scaling`, to `queries`, the rest to the cache."""
        batch, q = columns.shape
        self._native.store(
            *(batch * q, q, self._heads, self._key_heads, self._width),
            *y.arguments,
            *(table.data_ptr() for table in rotation),
            *(scaling, queries.data_ptr()),
            *_cached(cached),
            columns.data_ptr(),
        )

    def _attend(
        self,
        queries: Tensor,
        mask: Tensor | None,
        cached: Any,
        columns: Tensor,
        x: Inputs,
    ) -> None:
        """Write the attention of the queries to x."""
        batch, q = columns.shape
        end = cached.slots.end
        divided = x.rows.numel() * end >= DIVIDED
        self._native.attend(
            *(batch * q, q, self._heads, self._key_heads, self._width),
            queries.data_ptr(),
            *_cached(cached),
            *(mask.data_ptr() if mask is not None else None, columns.data_ptr(), end),
            *x.arguments,
            torch.get_num_threads() if divided else 1,
        )


def decoder_of(lm: Any, gate: ProbeGate, *, wide: bool) -> FusedDecoder | None:
    """Return the decoder of a view; None for another architecture or unpacked layers.

    It is a NativeDecoder if the layers are in int8 and native.c applies and can be compiled.
    """
    layers = layers_of(lm, wide=wide)
    if not layers:
        return None
    config = lm.config
    applies = (
        isinstance(layers[0].qkv, Int8Product)
        and config.hidden_act in ("silu", "swish")
        and not any(width % LANES for width in (config.hidden_size, head_width(config)))
    )
    native = library() if applies else None
    if native is None:
        return FusedDecoder(lm.get_decoder(), layers, gate, wide=wide)
    return NativeDecoder(native, lm.get_decoder(), layers, gate)


def _rows(h: Tensor) -> tuple[int, int, int]:
    """Return the number, the width and the address of rows."""
    d = h.shape[-1]
    return h.numel() // d, d, h.data_ptr()


def _cached(layer: Any) -> tuple[int, int, int, int]:
    """Return the addresses of a layer's keys and values, and the steps between sequences and between heads."""
    keys = layer.keys
    return keys.data_ptr(), layer.values.data_ptr(), keys.stride(0), keys.stride(1)
