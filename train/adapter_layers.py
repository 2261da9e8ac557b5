"""Compute peft's layers in fewer operations: same values and gradients, up to rounding.

peft computes  W x + s B A x  in five operations, three of them over all outputs, and the
gradient of x in five more. Here one operation multiplies by B and adds to W x (addmm):

    t = A x                       u = s Bᵀ g
    y = W x + s B t               ∂x = Wᵀ g + Aᵀ u        ∂A = u xᵀ        ∂B = s g tᵀ

To train a few rows of an embedding, peft copies the whole matrix in each forward and
makes a gradient of its size. Here the trained rows are a small separate matrix, and the
lookup takes a row from it if the id is one of the trained ids.
"""

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def use_fewer_operations(lm: nn.Module) -> None:
    """Replace, in place, peft's linear and trainable-token layers by the classes of this module."""
    faster: dict[type, type] = {
        Linear: LowRankLinear,
        TrainableTokensLayer: TrainedRows,
    }
    for module in lm.modules():
        if type(module) in faster:
            module.__class__ = faster[type(module)]


class LowRankLinear(Linear):
    """A frozen linear layer with one LoRA adapter."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's output, plus the adapter's output unless the adapter is disabled."""
        result: Tensor
        if not self._is_plain():
            result = super().forward(x, *args, **kwargs)
            return result
        (name,) = self.active_adapters
        base = self.get_base_layer()
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        result = _LowRankProduct.apply(  # type: ignore[no-untyped-call]
            x, base.weight, base.bias, a, b, self.scaling[name]
        )
        return result

    def _is_plain(self) -> bool:
        """Return whether the fast forward applies: one active adapter, no dropout, no hooks."""
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return False
        (name,) = self.active_adapters
        base = self.get_base_layer()
        if name not in self.lora_A or name in self.lora_variant:
            return False
        layers = base, self.lora_A[name], self.lora_B[name]
        return (
            all(type(layer) is nn.Linear for layer in layers)
            and layers[1].weight.dtype == base.weight.dtype
            and not base.weight.requires_grad
            and isinstance(self.lora_dropout[name], nn.Identity)
            # ZeRO 3 and accelerate load a layer's weights only during that layer's forward.
            and not any(
                layer._forward_pre_hooks or "forward" in vars(layer) for layer in layers
            )
        )


class _LowRankProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
    ) -> Tensor:
        rows = x.flatten(0, -2)
        low = rows @ a.T
        output = F.linear(rows, weight, bias).addmm_(low, b.T, alpha=scaling)
        ctx.save_for_backward(rows, low, weight, a, b)
        ctx.scaling = scaling
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, low, weight, a, b = ctx.saved_tensors
        gradient = d_output.flatten(0, -2)
        d_low = (gradient @ b).mul_(ctx.scaling)
        d_rows = None
        if ctx.needs_input_grad[0]:
            d_rows = (gradient @ weight).addmm_(d_low, a)
            d_rows = d_rows.view(*d_output.shape[:-1], -1)
        d_a = d_low.T @ rows
        d_b = (gradient.T @ low).mul_(ctx.scaling)
        return d_rows, None, None, d_a, d_b, None


class TrainedRows(TrainableTokensLayer):
    """An embedding with a few trained rows; the other rows are frozen."""

    def forward_adapters(
        self, x: Tensor, active_adapters: list[str], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return the (..., d) embeddings of (...) ids."""
        embedded: Tensor
        if (
            self.disable_adapters
            or self.merged
            or len(active_adapters) != 1
            or type(self.base_layer) is not nn.Embedding
        ):
            embedded = super().forward_adapters(x, active_adapters, *args, **kwargs)
            return embedded
        (name,) = active_adapters
        ids = torch.tensor(self.token_indices[name], device=x.device)
        matches = x[..., None] == ids
        trained = F.embedding(
            matches.int().argmax(-1), self.trainable_tokens_delta[name]
        )
        embedded = self.base_layer(x)
        return torch.where(matches.any(-1, keepdim=True), trained, embedded)
