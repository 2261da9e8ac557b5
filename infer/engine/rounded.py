"""Linear layers in int8 or bfloat16 on a CPU: exact for any number of rows.

In bfloat16 only the weights are rounded, and on CPUs with instructions for it the inputs of
products. A row's sum has one order (conf/devices/bfloat16.py). In int8 the inputs are rounded too:

    W ≈ diag(s) W8          s is a scale for each output row, W8 has values from -127 to 127
    x ≈ t (x8 - z)          t is a scale for each *row of the input*, x8 is unsigned, z its zero point
    Wx ≈ t s (W8 (x8 - z))  the sums in brackets are integers

smoothing.py scales the columns of W, and x, before.

Sums of integers do not depend on their order, and a row's scale depends only on the row. So a
row's product is the same bit for bit, whatever rows are computed beside it, and texts with
drafts equal the texts of plain decoding. One scale for several rows would break this. Inputs
are unsigned because the kernels for signed inputs are slow on most CPUs (conf/devices/int8.py).

Norms and rotary embeddings compute in float32, attention as in native.py or attention.py. The A matrices of an
adapter are part of the product; the products with B are rounded too. The head finds the
likeliest tokens with rounded numbers, and pick.py computes their logits again from the head's own weight.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from conf.devices.bfloat16 import bfloat16_kernel
from conf.devices.int8 import Kernel, Native, exact_kernel, pack
from conf.devices.native import LANES, warn_without_library
from conf.errors import UserError
from infer.engine.fused import activated, has_operations
from infer.engine.gate import GatedEmbedding, GatedLinear
from infer.engine.head import PreviousTokenHead
from infer.engine.native_choice import NativeRows
from infer.engine.native_head import rounded_head
from infer.engine.packed import Adapter, JointLinear, Product, join, linear_layers
from infer.engine.smoothing import record_inputs, smoothing

#: The modules that may have matrices: rounded, looked up, or used for drafts alone.
WITH_MATRICES = (
    nn.Linear,
    nn.Embedding,
    GatedLinear,
    GatedEmbedding,
    PreviousTokenHead,
)


#: The classes of activations in Transformers' layers.
ACTIVATIONS = {
    each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values()
}


class RoundedLinear(JointLinear):
    """A linear layer with a rounded weight. Its own weight is dropped once its product is packed.

    `inputs` are examples of its input rows (n, d), for smoothing.
    """

    def __init__(self, linear: nn.Linear, inputs: Tensor | None = None) -> None:
        super().__init__(linear)
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.float(), requires_grad=False)
        self.inputs = inputs

    @property
    def rounded(self) -> str:
        """See JointLinear."""
        product: Any = self.product
        dtype: str = product.kernel.dtype
        return dtype

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., d) to (..., d')."""
        y = self.adapted(x)
        assert y is not None
        return y

    def drop_weight(self) -> None:
        """Drop the weight's values and keep its shape."""
        self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RoundedLinear":
        """Return the layer itself: it does not change, and a packed weight cannot be copied."""
        return self


class RoundedHead(RoundedLinear):
    """An output head that also keeps its own weight, to rescore the likeliest tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., d) to (..., V) approximate logits."""
        assert self.product is not None
        return self.product.joint(x)[..., : self.out_features]

    def rows(
        self, hidden_nd: Tensor, logits_nV: Tensor, again: int
    ) -> NativeRows | None:
        """Return the rows for native.c, which chooses tokens; None if it does not apply."""
        product: Any = self.product
        kernel = type(product.kernel)
        rows, weight = (logits_nV, hidden_nd), self.weight
        usual = all(x.dtype == torch.float32 and x.stride(1) == 1 for x in rows)
        usual = usual and hidden_nd.is_contiguous() and weight.is_contiguous()
        if not issubclass(kernel, Native) or not usual or self.in_features % LANES:
            return None
        if weight.dtype != kernel.kept:
            return None
        native = kernel.library()
        return NativeRows(native, hidden_nd, logits_nV, again, weight, self.bias)

    def drop_weight(self) -> None:
        """No-op: the likeliest tokens are rescored with the weight."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "RoundedHead":
        """Return another head on the same product, since a draft model's head may be cut."""
        copied = RoundedHead(self)
        copied.product = self.product
        return copied


class WideEmbedding(nn.Embedding):
    """An embedding with a weight in bfloat16 and rows in float32. It shares the weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        rows, width = embedding.weight.shape
        super().__init__(rows, width, device="meta")
        self.weight = embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Embed (...) ids as (..., d)."""
        return super().forward(ids).float()


class RowActivation(nn.Module):
    """An activation that computes each row as it is without the rows beside it."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., w) to (..., w)."""
        return activated(self.activation, x)


class RoundedProduct(Product):
    """A Product by `kernel`, rounded once."""

    def __init__(
        self, layers: Mapping[Any, Adapter | None], kernel: type[Kernel]
    ) -> None:
        self._kernel = kernel
        super().__init__(layers)

    @property
    def usable(self) -> bool:
        """Always True: the rounded weights are on a CPU."""
        return True

    def single(self, x: Tensor) -> bool:
        """Return False: a row's product must not depend on the number of rows."""
        return False

    def refresh(self) -> None:
        """Round the weights on the first call."""
        if not self._source:
            super().refresh()

    def _pack(self, rows: Any) -> None:
        kernel = self._kernel
        (first, *_) = self.layers
        weight = torch.cat(list(rows)).detach().float()
        #: Multiplies the inputs (d,).
        self.shrink = torch.ones(weight.shape[1])
        if first.inputs is not None:
            outputs = sum(self.sizes[: len(self.layers)])
            s = smoothing(first.inputs, weight[:outputs])
            weight *= s
            self.shrink = 1 / s
        self.kernel = pack(weight, kernel)
        # Layers of a product either all have an adapter or all have no adapter.
        self.outer = [pack(b.T.detach().float(), kernel) for b in self.outer if len(b)]
        for layer in self.layers:
            layer.drop_weight()
            layer.inputs = None

    def _multiply(self, x: Tensor) -> Tensor:
        return self.kernel(x * self.shrink)

    def _add_outer(self, y: Tensor, inner: Tensor, outer: Any) -> None:
        y += outer(inner)


def to_int8(lm: PreTrainedModel, ids: Sequence[int] = ()) -> None:
    """Replace the linear layers of a float32 model on a CPU by layers in int8.

    With the `ids` of a text their inputs are smoothed. Only the head keeps its float32 weight.
    Raises UserError for a model with other matrices, such as experts: their float32 products of a
    row would depend on the rows beside it. Raises ValueError on a CPU without exact int8 sums.
    """
    kernel = exact_kernel()
    if kernel is None:
        raise ValueError("products in int8 are not exact on this CPU")
    if other := other_matrices(lm):
        raise UserError(
            "dtype must be float32 or bfloat16 for a model with matrices outside linear layers, "
            f"got int8: {lm.config.model_type} has {other}. Set dtype=float32."
        )
    inputs = record_inputs(lm, linear_layers(lm).values(), ids) if ids else {}
    round_layers(lm, kernel, inputs)


def to_bfloat16(lm: PreTrainedModel, most_bytes: int) -> bool:
    """Replace the linear layers of a bfloat16 model on a CPU by layers of native.c.

    All other operations compute in float32. Return False, and change nothing, for a model in another
    type or with another decoder than native.c's, for weights of more than `most_bytes`, which stay
    in their files, and if native.c cannot be compiled.
    """
    if lm.dtype != torch.bfloat16 or not has_operations(lm.config):
        return False
    size = sum(layer.weight.nbytes for layer in linear_layers(lm).values())
    if other_matrices(lm) or size > most_bytes:
        return False
    kernel = bfloat16_kernel()
    if kernel is None:
        warn_without_library("bfloat16")
        return False
    for name, module in list(lm.named_modules()):
        if type(module) is nn.Embedding:
            lm.set_submodule(name, WideEmbedding(module))
        elif not isinstance(module, (nn.Linear, GatedLinear)):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()
    round_layers(lm, kernel)
    return True


def kernel_of(lm: nn.Module) -> type[Kernel] | None:
    """Return what multiplies by a model's rounded weights; None for a model without them."""
    products: list[Any] = [
        module.product for module in lm.modules() if isinstance(module, RoundedLinear)
    ]
    return type(products[0].kernel) if products else None


def other_matrices(lm: PreTrainedModel) -> str | None:
    """Return the class of a module with matrices outside linear layers, or None."""
    for module in lm.modules():
        matrices = any(p.ndim > 1 for p in module.parameters(recurse=False))
        if matrices and not isinstance(module, WITH_MATRICES):
            return type(module).__name__
    return None


def round_layers(
    lm: PreTrainedModel,
    kernel: type[Kernel],
    inputs: dict[nn.Linear, Tensor] | None = None,
) -> None:
    """Replace the linear layers of a model by rounded layers with these examples of `inputs`.

    `inputs` is consumed: a layer's own weight is freed when its product is packed.
    """
    inputs = {} if inputs is None else inputs
    head = lm.get_output_embeddings()
    for name, module in list(lm.named_modules()):
        if type(module) in ACTIVATIONS:
            lm.set_submodule(name, RowActivation(module))
    layers = linear_layers(lm)
    of_head = [name for name, layer in layers.items() if layer is head]
    last = {name: layers.pop(name) for name in of_head}
    product = partial(RoundedProduct, kernel=kernel)
    join(
        lm, layers, lambda layer: RoundedLinear(layer, inputs.pop(layer, None)), product
    )
    join(lm, last, lambda layer: RoundedHead(layer, inputs.pop(layer, None)), product)
    correction = PreviousTokenHead.of(lm)
    if correction is not None:
        lm.previous_token_head = rounded_head(lm, correction, kernel)
