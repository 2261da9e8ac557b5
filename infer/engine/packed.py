"""Linear layers with packed weights, on a CPU in float32, and in bfloat16 where it computes in it.

PyTorch's product of several rows by a weight copies the weight to the layout of its kernel
first, which takes about as long as the product of one row. Here the copy is kept. Layers
that read the same input are one product, and their adapter's A are part of it; probes (engine/gate.py)
add their B's:

    x  ->  [ Wq x | Wk x | Wv x | Aq x | Ak x | Av x ]       probes: + [ Bq Aq x | Bk Ak x | Bv Av x ]

tests/benchmarks/packed.py measures it.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.engine.attention import ProbeGate, add_product

#: An adapter's A (r, d) and B (d', r).
Adapter: TypeAlias = tuple[Tensor, Tensor]
#: Types that this CPU has kernels for.
TYPES = []
if torch.backends.mkldnn.is_available():
    TYPES = [torch.float32]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        TYPES.append(torch.bfloat16)
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
        y = self.adapted(x)
        return F.linear(x, self.weight, self.bias) if y is None else y

    def adapted(self, x: Tensor, gate: ProbeGate | None = None) -> Tensor | None:
        """Return Wx (..., d'), with the adapter's update in the rows of an open gate.

        Returns None where the usual product is to be taken.
        """
        weight = self.weight
        # PyTorch's product of one row runs on one thread, and is the faster one there.
        single = x.numel() == self.in_features and torch.get_num_threads() == 1
        cpu = weight.device.type == "cpu" and weight.dtype in TYPES
        if self.product is None or single or not cpu or torch.is_grad_enabled():
            return None
        y = self.product.take(self, x, gate)
        return y if self.bias is None else y + self.bias


class Product:
    """The products of one input by the weights of several layers, each with its A and B or None.

    The packed copy is made again after a weight has changed.
    """

    def __init__(self, layers: Mapping[PackedLinear, Adapter | None]) -> None:
        self._layers = layers
        self._source: list[Any] = []  # what the copy was made of
        self._sizes: list[int] = []
        # An input, and the parts of its product that no layer has taken: a layer may
        # change its part. In a tuple, which other threads replace but never change.
        self._last: tuple[Tensor | None, dict[PackedLinear, Tensor]] = (None, {})
        for layer in layers:
            layer.product = self
        self._pack()

    def take(
        self, layer: PackedLinear, x: Tensor, gate: ProbeGate | None = None
    ) -> Tensor:
        """Return the layer's part, computed for all layers when the first one asks."""
        last, parts = self._last
        if last is not x or layer not in parts:
            self._pack()
            y = torch.ops.mkldnn._linear_pointwise(
                x, self._packed, None, "none", [], ""
            )
            if gate is not None and gate.rows:
                rows = gate.probes(y).split(self._sizes, -1)
                for update in zip(rows, rows[len(self._layers) :], self._outer):
                    add_product(*update)
            parts = dict(zip(self._layers, y.split(self._sizes, -1)))
            self._last = x, parts
        return parts.pop(layer)

    def _pack(self) -> None:
        weights = [layer.weight for layer in self._layers]
        adapters = self._layers.values()
        source = [
            (id(w), w.data_ptr(), 0 if w.is_inference() else w._version)
            for w in (*weights, *chain.from_iterable(filter(None, adapters)))
        ]
        if source != self._source:
            pairs = [
                pair or (w[:0], w.new_empty(len(w), 0))
                for w, pair in zip(weights, adapters)
            ]
            rows = [*weights, *(a for a, _ in pairs)]
            self._sizes = list(map(len, rows))
            self._packed = torch.ops.mkldnn._reorder_linear_weight(
                torch.cat(rows).detach()
            )
            self._outer = [b.T for _, b in pairs]
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
    groups: dict[Any, dict[PackedLinear, Adapter | None]] = {}
    for name, layer in layers.items():
        packed = PackedLinear(layer)
        lm.set_submodule(name, packed)
        gated = name.removesuffix(".base")  # engine/gate.py
        parent, _, own = gated.rpartition(".")
        owner: Any = lm.get_submodule(gated)
        adapter = (owner.a, owner.b) if hasattr(owner, "a") else None
        # One gate for all of a group: the first layer that asks brings it.
        key = parent, SIBLINGS.get(own, own), layer.in_features, adapter is None
        groups.setdefault(key, {})[packed] = adapter
    for group in groups.values():
        Product(group)
