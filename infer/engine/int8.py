"""Linear layers in int8 on a CPU: exact for any number of rows.

    W ≈ diag(s) W8          s a scale for each output row, W8 from -127 to 127
    x ≈ t (x8 - z)          t a scale for each *row of the input*, x8 unsigned, z its zero point
    Wx ≈ t s (W8 (x8 - z))  the sums in brackets are integers

Sums of integers do not depend on their order, and a row's scale only on the row: a row's
product is the same bit for bit whatever rows are computed beside it, so drafted texts are
plain decoding's. One scale for several rows would break this. Unsigned inputs, since
oneDNN has no fast kernel of signed ones on most CPUs.

Norms, rotary embeddings and attention compute in float32 and wider (attention.py). The
adapter's A's are part of the product; B's are added in float32. The head finds the likeliest
tokens in int8, and pick.py computes their logits again from its float32 weight.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from conf.devices.dtype import LEVELS, has_exact_int8
from conf.errors import UserError
from infer.engine.gate import GatedEmbedding, GatedLinear
from infer.engine.head import PreviousTokenHead
from infer.engine.packed import Adapter, JointLinear, Product, join, linear_layers

#: Modules with matrices that become integers, are looked up, or act on drafts alone.
WITH_MATRICES = (
    nn.Linear,
    nn.Embedding,
    GatedLinear,
    GatedEmbedding,
    PreviousTokenHead,
)
ZERO_POINT = LEVELS + 1  # of inputs
TINY = 1e-30  # an output row of zeros has a scale too


class Int8Linear(JointLinear):
    """A linear layer in int8; its float32 weight is dropped after its product is made."""

    int8 = True

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., d) to (..., d')."""
        y = self.adapted(x)
        assert y is not None
        return y

    def drop_weight(self) -> None:
        """Keep the weight's shape alone."""
        self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Int8Linear":
        """Return the layer itself: it never changes, and its packed weight cannot be copied."""
        return self


class Int8Head(Int8Linear):
    """The output head, which keeps its float32 weight for the likeliest tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., d) to (..., V) logits that find the likeliest tokens."""
        assert self.product is not None
        return self.product.joint(x)[..., : self.out_features]

    def drop_weight(self) -> None:
        """No-op: the weight computes the logits of the likeliest tokens."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Int8Head":
        """Return a head of its own on the same product: a draft model's may be cut."""
        copied = Int8Head(self)
        copied.product = self.product
        return copied


class Int8Product(Product):
    """See Product; the integers are made once. Raises ValueError on a CPU without exact sums."""

    def __init__(self, layers: Mapping[Any, Adapter | None]) -> None:
        if not has_exact_int8():
            raise ValueError("products in int8 are not exact on this CPU")
        super().__init__(layers)

    @property
    def usable(self) -> bool:
        """True: the integers are on a CPU."""
        return True

    def single(self, x: Tensor) -> bool:
        """Return False: a row's product must not depend on the number of rows."""
        return False

    def refresh(self) -> None:
        """Make the integers the first time."""
        if not self._source:
            super().refresh()

    def _pack(self, rows: Any) -> None:
        weight = torch.cat(list(rows)).detach().float()
        scale = weight.abs().amax(1).clamp_(min=TINY) / LEVELS
        quantised = (weight / scale[:, None]).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(quantised, None)
        self._scale = scale / LEVELS
        self._zeros = torch.zeros(len(scale), dtype=torch.int32)
        for layer in self.layers:
            layer.drop_weight()

    def _multiply(self, x: Tensor) -> Tensor:
        quantised, largest = quantise_rows(x)
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            quantised,
            1.0,
            ZERO_POINT,
            self._packed,
            self._scale,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return y.mul_(largest)


# Tensors: PyTorch converts a number at each use.
_LEVELS = torch.tensor(float(LEVELS))
_OFFSET = torch.tensor(ZERO_POINT + 0.5)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x (..., d) in unsigned integers, and each row's largest number (..., 1).

    x is about (integers - ZERO_POINT) * largest / LEVELS. A row's integers depend on no other
    row. A row of zeros becomes any integers, times 0.
    """
    largest = x.abs().amax(-1, keepdim=True)
    # Positive numbers are rounded by adding a half and cutting.
    return (x * (_LEVELS / largest)).add_(_OFFSET).to(torch.uint8), largest


def to_int8(lm: PreTrainedModel) -> None:
    """Replace the linear layers of a float32 model on a CPU by layers in int8.

    Their float32 weights are dropped, but the head's. Raises UserError for a model with other
    products, such as those of experts: in float32 they would depend on the rows beside a row.
    """
    for module in lm.modules():
        matrices = any(p.ndim > 1 for p in module.parameters(recurse=False))
        if matrices and not isinstance(module, WITH_MATRICES):
            raise UserError(
                "dtype must be float32 or bfloat16 for a model whose products are not all linear layers, "
                f"got int8: {lm.config.model_type} has {type(module).__name__}. Set dtype=float32."
            )
    head: Any = lm.get_output_embeddings()
    layers = linear_layers(lm)
    inner = {name: layer for name, layer in layers.items() if layer is not head}
    last = {name: layer for name, layer in layers.items() if layer is head}
    join(lm, inner, Int8Linear, Int8Product)
    join(lm, last, Int8Head, Int8Product)
