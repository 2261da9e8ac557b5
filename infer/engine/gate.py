"""Layers with an adapter that acts on probes only; all other rows use the base model alone.

    rows    drafts            probes
            0 .. first - 1    first .. q - 1
            Wx                Wx + s·BAx       W for all rows at once, then A and B

The adapter does not change the row of a draft. models/gated.py reads an adapter from its
files.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from infer.engine.attention import ProbeGate, add_product
from infer.engine.packed import JointLinear


class GatedLinear(nn.Module):
    """A linear layer that computes Wx for drafts and Wx + s·BAx for probes.

    `base` is W with its bias; `a` (r, d) and `b` (d', r) are the adapter. If the columns of W
    are divided over ranks, the columns of A are too, and an all-reduce over `group` sums Ax.
    """

    def __init__(
        self,
        base: nn.Module,
        a: Tensor,
        b: Tensor,
        scaling: float,
        gate: ProbeGate,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.gate = gate
        self.group = group
        # Stored transposed, the layout that the products read.
        self.a = _frozen(a.T.contiguous().T)
        self.b = _frozen((b * scaling).T.contiguous().T)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, q, d) to (B, q, d'), or in some model families (B·q, d) to (B·q, d')."""
        if isinstance(self.base, JointLinear):
            adapted = self.base.adapted(x, self.gate)
            if adapted is not None:
                return adapted
        y: Tensor = self.base(x)
        if self.gate.rows:
            # With two-dimensional operands PyTorch does not copy the weight for each sequence.
            inner = x.reshape(-1, x.shape[-1]) @ self.a.T
            if self.group is not None:
                dist.all_reduce(inner, group=self.group)
            add_product(self.gate.probes(y), self.gate.probes(inner), self.b.T)
        return y


class GatedEmbedding(nn.Module):
    """An embedding that uses the adapter's `rows` (n, d) for the `ids` (n,) of probes.

    All other rows use the base embedding. If the base embedding scales its rows, as Gemma's
    does, the adapter's rows are scaled too.
    """

    def __init__(
        self, base: nn.Embedding, ids: Tensor, rows: Tensor, gate: ProbeGate
    ) -> None:
        super().__init__()
        self.base = base
        self.gate = gate
        scale: Tensor | float = getattr(base, "embed_scale", 1.0)
        self.rows = _frozen(rows * torch.as_tensor(scale).to(rows))
        index = torch.full((base.num_embeddings,), -1, device=ids.device)
        index[ids] = torch.arange(len(ids), device=ids.device)
        self.index: Tensor
        self.register_buffer("index", index, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The base embedding's weight, which Transformers reads."""
        return self.base.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Embed (B, q) ids as (B, q, d)."""
        y: Tensor = self.base(ids)
        first = self.gate.first
        if self.gate.rows:
            index = self.index[ids[:, first:]]
            own = F.embedding(index.clamp(min=0), self.rows)
            y[:, first:] = torch.where(index[..., None] < 0, y[:, first:], own)
        return y


def with_gate(module: nn.Module, gate: ProbeGate) -> nn.Module:
    """Return a gated module with another gate, on the same weights; any other module unchanged."""
    if not isinstance(module, (GatedLinear, GatedEmbedding)):
        return module
    copied = copy.copy(module)
    copied.gate = gate
    return copied


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
