"""Linear layers with packed weights, on a CPU in float32, and in bfloat16 where it computes in it.

PyTorch's product of several rows by a weight copies the weight to the layout of its kernel
first, which takes about as long as the product of one row. Here the copy is kept. Layers
that read the same input are one product, and an adapter's A is part of its layer's:

    x  ->  [ Wq x | Aq x | Wk x | Ak x | Wv x | Av x ]        engine/gate.py adds B(Ax)

tests/benchmarks/packed.py measures it.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Types that this CPU has kernels for.
TYPES = []
if torch.backends.mkldnn.is_available():
    TYPES = [torch.float32]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        TYPES = [torch.float32, torch.bfloat16]
#: Layers of one parent that read the same input.
SIBLINGS = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate, up",
    "up_proj": "gate, up",
}


class PackedLinear(nn.Linear):
    """`linear` on the same weight, by the product it is part of."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(
            linear.in_features, linear.out_features, bias=False, device="meta"
        )
        self.weight = linear.weight
        self.bias = linear.bias
        self.product: Product | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the product: a packed tensor cannot be copied."""
        return {**self.__dict__, "product": None}

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., d) to (..., d')."""
        return self.with_inner(x)[0]

    def with_inner(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return Wx (..., d'), and Ax (..., r) if it is part of the product."""
        weight = self.weight
        # PyTorch's product of one row runs on one thread, and is the faster one there.
        single = x.numel() == self.in_features and torch.get_num_threads() == 1
        cpu = weight.device.type == "cpu" and weight.dtype in TYPES
        if self.product is None or single or not cpu or torch.is_grad_enabled():
            return F.linear(x, weight, self.bias), None
        part = self.product.take(self, x)
        d = len(weight)
        y = part[..., :d] if self.bias is None else part[..., :d] + self.bias
        return y, part[..., d:] if part.shape[-1] > d else None


class Product:
    """The products of one input by the weights of several layers, each with its A or None.

    The packed copy is made again after a weight has changed.
    """

    def __init__(self, layers: Mapping[PackedLinear, Tensor | None]) -> None:
        self._layers = layers
        self._source: list[Any] = []  # what the copy was made of
        self._sizes: list[int] = []
        # An input, and the parts of its product that no layer has taken: a layer may
        # change its part. In a tuple, which other threads replace but never change.
        self._last: tuple[Tensor | None, dict[PackedLinear, Tensor]] = (None, {})
        for layer in layers:
            layer.product = self
        self._pack()

    def take(self, layer: PackedLinear, x: Tensor) -> Tensor:
        """Return [Wx | Ax] of a layer, computed for all layers when the first one asks."""
        last, parts = self._last
        if last is not x or layer not in parts:
            self._pack()
            y = torch.ops.mkldnn._linear_pointwise(
                x, self._packed, None, "none", [], ""
            )
            parts = dict(zip(self._layers, y.split(self._sizes, -1)))
            self._last = x, parts
        return parts.pop(layer)

    def _pack(self) -> None:
        weights = [
            [w for w in (layer.weight, a) if w is not None]
            for layer, a in self._layers.items()
        ]
        flat = list(chain.from_iterable(weights))
        source = [
            (id(w), w.data_ptr(), 0 if w.is_inference() else w._version) for w in flat
        ]
        if source != self._source:
            self._sizes = [sum(map(len, own)) for own in weights]
            self._packed = torch.ops.mkldnn._reorder_linear_weight(
                torch.cat(flat).detach()
            )
            self._source = source


def pack(lm: nn.Module, most_bytes: int) -> None:
    """Replace the linear layers of a model on a CPU by packed ones.

    Do nothing where their copies, as large as the weights, would take more than
    `most_bytes`.
    """
    layers = {
        name: module
        for name, module in lm.named_modules()
        if type(module) is nn.Linear and module.weight.dtype in TYPES
    }
    size = sum(layer.weight.nbytes for layer in layers.values())
    if size > most_bytes:
        return
    groups: dict[Any, dict[PackedLinear, Tensor | None]] = {}
    for name, layer in layers.items():
        packed = PackedLinear(layer)
        lm.set_submodule(name, packed)
        gated = name.removesuffix(".base")  # engine/gate.py
        parent, _, own = gated.rpartition(".")
        key = parent, SIBLINGS.get(own, own), layer.in_features
        a = getattr(lm.get_submodule(gated), "a", None)
        groups.setdefault(key, {})[packed] = a
    for group in groups.values():
        Product(group)
