"""The decoder of fused.py in int8 or bfloat16 as one call of native.c.

    h -> norm ─► [q|k|v] -> rotation, cache, attention ─► o -> h += o, norm ─►
         [g|u] -> silu(g) u ─► down -> h += down, norm ─► ...

An arrow ─► is a product: its input is rounded, in int8 with a scale for each row. In the C
functions a row's sums have one order, whatever rows are beside it and in whatever columns its
keys are. So a row's result is the same in every forward, bit for bit, in float32.

Without a C compiler, decoding uses PyTorch's operations (fused.py).
"""

from collections.abc import Mapping, Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_float,
    c_int,
    c_long,
    c_void_p,
)
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from conf.devices.int8 import DIVIDED, Native
from conf.devices.native import CMatrix
from infer.engine.attention import ProbeGate
from infer.engine.cache import TreeCache
from infer.engine.fused import FusedDecoder, Layer, has_operations, layers_of
from infer.engine.rounded import RoundedProduct

#: The largest number of layers in a product.
PARTS = 3


class CProduct(Structure):
    """`product` of native.c."""

    _fields_ = [
        *((name, CMatrix) for name in ("w", "base")),
        ("parts", c_long),
        *((name, c_void_p) for name in ("bias", "shrink")),
        *((name, c_long * PARTS) for name in ("sizes", "ranks")),
        ("b", CMatrix * PARTS),
    ]


class CLayer(Structure):
    """`layer` of native.c."""

    _fields_ = [
        *((name, CProduct) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm")),
        ("scaling", c_float),
    ]


class CDecoder(Structure):
    """`decoder` of native.c."""

    _fields_ = [
        *((name, c_long) for name in ("layers", "d", "heads", "key_heads", "width")),
        ("layer", POINTER(CLayer)),
        ("norm", c_void_p),
        ("epsilon", c_float),
    ]


class CCached(Structure):
    """`cached` of native.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_long) for name in ("sequence_step", "head_step")),
        ("mask", c_void_p),
    ]


class CForward(Structure):
    """`forward` of native.c."""

    _fields_ = [
        *((name, c_long) for name in ("n", "rows", "first", "end")),
        *((name, c_void_p) for name in ("columns", "cosine", "sine")),
        *((name, c_void_p) for name in ("h", "y", "queries", "largest", "x")),
        ("divided", c_long),
        ("threads", c_int),
    ]


class NativeDecoder(FusedDecoder):
    """The decoder of rounded layers by native.c. Its masks are boolean, its cache is in bfloat16."""

    cache_type = torch.bfloat16

    def __init__(
        self, kernel: type[Native], decoder: Any, layers: list[Layer], gate: ProbeGate
    ) -> None:
        super().__init__(decoder, layers, gate, wide=True)
        self._native = kernel.library()
        norm: Any = self._norm
        self._norms = [norms_of(layer) for layer in layers]
        c_layers = (CLayer * len(layers))(*map(c_layer, layers, self._norms))
        self._c = CDecoder(
            *(len(layers), len(norm.weight)),
            *(self._heads, self._key_heads, self._width),
            *(c_layers, norm.weight.data_ptr(), norm.epsilon),
        )
        # Adapters may be on some layers only, so layers differ in size.
        products = [
            product
            for layer in c_layers
            for product in (layer.qkv, layer.o, layer.gate_up, layer.down)
        ]
        widest = max(product.w.d for product in products)
        self._inputs = widest * self._native.input_size()  # bytes of a row
        self._outputs = max(product.w.outputs for product in products)
        # By cache. The keys and values of a cache stay where they are.
        self._caches: WeakKeyDictionary[TreeCache, Any] = WeakKeyDictionary()

    def __call__(
        self,
        ids_Bq: Tensor,
        positions_Bq: Tensor,
        masks: Mapping[str, Tensor | None],
        cache: TreeCache,
    ) -> Tensor:
        """Return hidden states (B, q, d). See FusedDecoder."""
        h = self._embed(ids_Bq).contiguous()
        cosine, sine = (
            table.contiguous() for table in self._rotary(h, position_ids=positions_Bq)
        )
        end = cache.slots.end
        assert end <= cache.capacity  # C does not check sizes
        batch, q = ids_Bq.shape
        n = batch * q
        columns = cache.slots.of_rows(batch).contiguous()
        shape = batch, 1, q, end
        masks = {
            kind: None if mask is None else mask.expand(shape).contiguous()
            for kind, mask in masks.items()
        }
        y, queries = (
            h.new_empty(n, self._outputs),
            h.new_empty(n, self._heads * self._width),
        )
        largest, x = h.new_empty(n), h.new_empty(n, self._inputs, dtype=torch.uint8)
        first = self._gate.first if self._gate.rows else q
        forward = CForward(
            *(n, q, first, end),
            *_addresses(columns, cosine, sine, h, y, queries, largest, x),
            *(DIVIDED, torch.get_num_threads()),
        )
        result = torch.empty_like(h)
        self._native.decode(
            *(byref(self._c), byref(forward), self._cached(cache, masks)),
            result.data_ptr(),
        )
        return result

    def _cached(self, cache: TreeCache, masks: Mapping[str, Tensor | None]) -> Any:
        """Return the addresses of all layers' keys, values and masks."""
        cached = self._caches.get(cache)
        if cached is None:
            cached = self._caches[cache] = (CCached * len(self._layers))()
            layers: Any = cache.layers
            for c, item in zip(cached, layers):
                c.keys, c.values = _addresses(item.keys, item.values)
                c.sequence_step, c.head_step, *_ = item.keys.stride()
        of_masks = {
            kind: None if mask is None else mask.data_ptr()
            for kind, mask in masks.items()
        }
        (first, *rest) = of_masks.values()
        for c, layer in zip(cached, self._layers):
            c.mask = of_masks[layer.kind] if rest else first
        return cached


def c_layer(layer: Layer, norms: Sequence[Tensor]) -> CLayer:
    """Return the structure of a layer with these weights of its norms, which the caller keeps."""
    products = layer.qkv, layer.o, layer.gate_up, layer.down
    return CLayer(*map(c_product, products), *_addresses(*norms), layer.scaling)


def norms_of(layer: Layer) -> list[Tensor]:
    """Return the weights (d,) of both norms, times the factors of the products that follow."""
    norms: Any = layer.norms
    products: Any = layer.qkv, layer.gate_up
    return [norm.weight * product.shrink for norm, product in zip(norms, products)]


def c_product(product: Any) -> CProduct:
    """Return the structure of a RoundedProduct, which is built once."""
    structure = _structures.get(product)
    if structure is None:
        structure = _structures[product] = _built(product)
    return structure


#: The structures of products, with the biases that only C reads.
_structures: WeakKeyDictionary[RoundedProduct, CProduct] = WeakKeyDictionary()


def _built(product: Any) -> CProduct:
    kernel: Native = product.kernel
    parts = len(product.layers)
    bias = torch.zeros(kernel.outputs)
    if product.bias is not None:
        bias[: len(product.bias)] = product.bias
    outer: list[Any] = product.outer
    outputs = sum(product.sizes[:parts])
    structure = CProduct(
        *(kernel.matrix, kernel.first_rows(outputs), parts),
        *(bias.data_ptr(), product.shrink.data_ptr()),
        (c_long * PARTS)(*product.sizes[:parts]),
        (c_long * PARTS)(*product.sizes[parts:]),
        (CMatrix * PARTS)(*(b.matrix for b in outer)),
    )
    structure.kept = bias
    return structure


def decoder_of(lm: Any, gate: ProbeGate, *, wide: bool) -> FusedDecoder | None:
    """Return a fused decoder of a model; None for another architecture or unpacked layers.

    It is a NativeDecoder if the layers are rounded and native.c applies and can be compiled.
    """
    layers = layers_of(lm, wide=wide)
    if not layers:
        return None
    kernel = type(getattr(layers[0].qkv, "kernel", None))
    if issubclass(kernel, Native) and has_operations(lm.config):
        return NativeDecoder(kernel, lm.get_decoder(), layers, gate)
    return FusedDecoder(lm.get_decoder(), layers, gate, wide=wide)


def _addresses(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
