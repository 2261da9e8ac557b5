"""Linear layers with packed weights on a CPU, in float32, and in bfloat16 if the CPU supports it.

To multiply several rows, PyTorch first copies the weight to the layout of its kernel. The copy
takes about as long as the product of one row. Here the copy is stored. Layers that read the
same input are joined into one product with the A matrices of their adapter; for probes
(engine/gate.py) the products with B are added:

    x  ->  [ Wq x | Wk x | Wv x | Aq x | Ak x | Av x ]       probes: + [ Bq Aq x | Bk Ak x | Bv Av x ]

rounded.py has the same layers in int8, and in bfloat16 by native.c. tests/benchmarks/packed.py measures both.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.engine.attention import ProbeGate, add_product

#: An adapter's A (r, d) and B (d', r).
Adapter: TypeAlias = tuple[Tensor, Tensor]
#: The dtypes that this CPU has kernels for.
TYPES = []
if torch.backends.mkldnn.is_available():
    TYPES = [torch.float32]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        TYPES.append(torch.bfloat16)
#: The layers of one parent module that read the same input, by the name of their group.
SIBLINGS = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate, up",
    "up_proj": "gate, up",
}
#: The number of rows of each bfloat16 product with AMX. The last bit of AMX's kernels depends on
#: the number of rows; with a fixed number a row does not depend on the rows beside it.
FIXED_ROWS = 16


class JointLinear(nn.Linear):
    """A linear layer that is computed as part of a `Product`; it shares the weight of `linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(
            linear.in_features, linear.out_features, bias=False, device="meta"
        )
        self.weight = linear.weight
        self.bias = linear.bias
        self.product: Product | None = None

    @property
    def rounded(self) -> str | None:
        """The type of a rounded weight (rounded.py); None for another weight."""
        return None

    def adapted(self, x: Tensor, gate: ProbeGate | None = None) -> Tensor | None:
        """Return Wx (..., d'), with the adapter's update in the rows of an open gate.

        Return None if the caller should use the usual product.
        """
        assert self.product is not None
        y = self.product.take(self, x, gate)
        return y if self.bias is None else y + self.bias


class PackedLinear(JointLinear):
    """A linear layer that uses its packed product if it can, otherwise the usual product."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the product: a packed tensor cannot be copied."""
        return {**self.__dict__, "product": None}

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., d) to (..., d')."""
        y = self.adapted(x)
        return F.linear(x, self.weight, self.bias) if y is None else y

    def adapted(self, x: Tensor, gate: ProbeGate | None = None) -> Tensor | None:
        """See JointLinear."""
        product = self.product
        if product is None or not product.usable or torch.is_grad_enabled():
            return None
        return None if product.single(x) else super().adapted(x, gate)


class Product:
    """One product of an input by the weights of several layers, in a packed copy.

    `layers` maps each layer to its adapter's A and B, or to None. The weights are packed again
    after one of them has changed.
    """

    def __init__(self, layers: Mapping[Any, Adapter | None]) -> None:
        self.layers = layers
        self._source: list[Any] = []  # identifies the weights of the packed copy
        #: The outputs of each layer, then the ranks of their adapters.
        self.sizes: list[int] = []
        self.outer: list[Any] = []  # B matrices, transposed (r, d'), or packed
        #: The biases of all layers side by side, then zeros for the products with A.
        self.bias: Tensor | None = None
        # The last input, and the parts of its product that no layer has taken yet. A part is
        # handed out once, because its layer may change it. A tuple, so that another thread can
        # only replace it as a whole.
        self._last: tuple[Tensor | None, dict[JointLinear, Tensor]] = (None, {})
        for layer in layers:
            layer.product = self
        self.refresh()

    @property
    def in_features(self) -> int:
        """The number of input features."""
        (first, *_) = self.layers
        width: int = first.in_features
        return width

    @property
    def usable(self) -> bool:
        """Whether the weights are on a CPU, in a dtype with kernels."""
        weights = [layer.weight for layer in self.layers]
        return all(w.device.type == "cpu" and w.dtype in TYPES for w in weights)

    def take(
        self, layer: JointLinear, x: Tensor, gate: ProbeGate | None = None
    ) -> Tensor:
        """Return a layer's output. The first call with an input computes all layers."""
        last, parts = self._last
        if last is not x or layer not in parts:
            self.refresh()
            y = self._adapted(x, gate)
            parts = dict(zip(self.layers, y.split(self.sizes, -1)))
            self._last = x, parts
        part = parts.pop(layer)
        if not parts:
            self._last = None, {}  # frees the input, which may be a long prompt's
        return part

    def joint(self, x: Tensor, gate: ProbeGate | None = None) -> Tensor:
        """Return the outputs of all layers side by side (..., sum of d'), then the products with A.

        It uses the weights of the last `refresh`.
        """
        if self.single(x) and not (gate and gate.rows):
            parts = [F.linear(x, layer.weight, layer.bias) for layer in self.layers]
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        y = self._adapted(x, gate)
        return y if self.bias is None else y + self.bias

    def single(self, x: Tensor) -> bool:
        """Return True if PyTorch's usual product of `x` is faster than the packed product.

        This is so for one row in float32 on one thread.
        """
        return (
            x.numel() == self.in_features
            and torch.get_num_threads() == 1
            and x.dtype == torch.float32
        )

    def _adapted(self, x: Tensor, gate: ProbeGate | None) -> Tensor:
        y = self._multiply(x)
        if gate is not None and gate.rows:
            rows = gate.probes(y).split(self.sizes, -1)
            for update in zip(rows, rows[len(self.layers) :], self.outer):
                self._add_outer(*update)
        return y

    def _add_outer(self, y: Tensor, inner: Tensor, outer: Any) -> None:
        add_product(y, inner, outer)

    def _multiply(self, x: Tensor) -> Tensor:
        """Return the product of x with all weights and all A matrices."""
        if x.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
            return self._multiply_by_fixed_rows(x)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, None, "none", [], ""
        )
        return y

    def _multiply_by_fixed_rows(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        n = len(rows)
        padded = F.pad(rows, (0, 0, 0, -n % FIXED_ROWS))
        parts = [
            torch.ops.mkldnn._linear_pointwise(part, self._packed, None, "none", [], "")
            for part in padded.split(FIXED_ROWS)
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y[:n].view(*x.shape[:-1], -1)

    def refresh(self) -> None:
        """Pack the weights again if one of them has changed."""
        adapters = self.layers.values()
        source = [
            (id(w), w.data_ptr(), 0 if w.is_inference() else w._version)
            for w in (
                *(layer.weight for layer in self.layers),
                *chain.from_iterable(filter(None, adapters)),
            )
        ]
        if source != self._source:
            self._pack(self._collect())
            self._source = source

    def _collect(self) -> list[Tensor]:
        """Return all weights and A matrices; store the B matrices and the biases."""
        weights = [layer.weight for layer in self.layers]
        pairs = [
            pair or (w[:0], w.new_empty(len(w), 0))
            for w, pair in zip(weights, self.layers.values())
        ]
        rows = [*weights, *(a for a, _ in pairs)]
        self.sizes = list(map(len, rows))
        self.outer = [b.T for _, b in pairs]
        biases = [layer.bias for layer in self.layers]
        if any(bias is not None for bias in biases):
            of_layers = [
                w.new_zeros(len(w)) if bias is None else bias
                for w, bias in zip(weights, biases)
            ]
            of_inner = weights[0].new_zeros(sum(self.sizes[len(weights) :]))
            self.bias = torch.cat([*of_layers, of_inner]).detach()
        return rows

    def _pack(self, rows: Sequence[Tensor]) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(
            torch.cat(list(rows)).detach()
        )


def pack(lm: nn.Module, most_bytes: int) -> None:
    """Replace the linear layers of a model on a CPU by packed ones.

    The packed copies are as large as the weights. Do nothing if they would take more than
    `most_bytes`.
    """
    layers = {
        name: layer
        for name, layer in linear_layers(lm).items()
        if layer.weight.dtype in TYPES
    }
    if sum(layer.weight.nbytes for layer in layers.values()) <= most_bytes:
        join(lm, layers, PackedLinear, Product)


def rounded_type(lm: nn.Module) -> str | None:
    """Return the type of a model's linear layers if they are rounded (rounded.py), else None."""
    types = (getattr(module, "rounded", None) for module in lm.modules())
    return next(filter(None, types), None)


def dtype_of(lm: Any) -> str:
    """Return a loaded model's dtype as a value of the setting `dtype`."""
    return rounded_type(lm) or str(lm.dtype).removeprefix("torch.")


def linear_layers(lm: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that can be joined, by name."""
    return {
        name: module for name, module in lm.named_modules() if type(module) is nn.Linear
    }


def join(
    lm: nn.Module,
    layers: dict[str, nn.Linear],
    joint_layer: Callable[[nn.Linear], JointLinear],
    product: Callable[[Mapping[Any, Adapter | None]], Product],
) -> None:
    """Replace layers of a model by joint layers; layers with the same input share a `product`.

    `layers` is consumed, so that a product can free the weights that it packs.
    """
    groups: dict[Any, dict[JointLinear, Adapter | None]] = {}
    for name in list(layers):
        part = joint_layer(layers.pop(name))
        lm.set_submodule(name, part)
        gated = name.removesuffix(".base")  # engine/gate.py
        parent, _, own = gated.rpartition(".")
        owner: Any = lm.get_submodule(gated)
        adapter = (owner.a, owner.b) if hasattr(owner, "a") else None
        # The layers of a group share one gate: the first layer that is called passes it.
        key = parent, SIBLINGS.get(own, own), part.in_features, adapter is None
        groups.setdefault(key, {})[part] = adapter
    while groups:
        product(groups.pop(next(iter(groups))))
