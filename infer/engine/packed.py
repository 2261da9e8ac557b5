"""Linear layers with packed weights, for a few rows on a CPU in float32.

PyTorch's product of several rows by a weight copies the weight to the layout of its kernel
first, which takes about as long as the product of one row. Here the copy is kept.
tests/benchmarks/packed.py measures both.
"""

from typing import Any

import torch
import torch.nn.functional as F
from psutil import virtual_memory
from torch import Tensor, nn

#: More rows cost as much without the copy.
MOST_ROWS = 24


class PackedLinear(nn.Linear):
    """`linear` on the same weight, and a packed copy of it for up to `MOST_ROWS` rows.

    The copy is made again after the weight has changed.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(
            linear.in_features, linear.out_features, bias=False, device="meta"
        )
        self.weight = linear.weight
        self.bias = linear.bias
        self._packed: Tensor | None = None
        self._source: tuple[int, ...] = ()  # what the copy was made of
        self._pack()

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the copy: a packed tensor cannot be copied."""
        return {**self.__dict__, "_packed": None, "_source": ()}

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., d) to (..., d')."""
        weight = self.weight
        # PyTorch's product of one row runs on one thread, and is the faster one there.
        least = 1 if torch.get_num_threads() > 1 else 2
        few = least <= x.numel() // self.in_features <= MOST_ROWS
        cpu = weight.dtype == torch.float32 and weight.device.type == "cpu"
        if not few or not cpu or torch.is_grad_enabled():
            return F.linear(x, weight, self.bias)
        self._pack()
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return y

    def _pack(self) -> None:
        weight = self.weight
        version = 0 if weight.is_inference() else weight._version
        source = (id(weight), weight.data_ptr(), version)
        if source != self._source:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(
                weight.detach(), MOST_ROWS
            )
            self._source = source


def pack(lm: nn.Module) -> None:
    """Replace the linear layers of a model in float32 on a CPU by packed ones.

    Do nothing where their copies, as large as the weights, would take more than half of
    the memory that is left.
    """
    layers = {
        name: module
        for name, module in lm.named_modules()
        if type(module) is nn.Linear and module.weight.dtype == torch.float32
    }
    size = sum(layer.weight.nbytes for layer in layers.values())
    if torch.backends.mkldnn.is_available() and 2 * size < virtual_memory().available:
        for name, layer in layers.items():
            lm.set_submodule(name, PackedLinear(layer))
