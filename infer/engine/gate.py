"""Layers whose adapter acts on probes only; all other rows are the base model's.

    rows    drafts            probes
            0 .. first - 1    first .. q - 1
            Wx                Wx + s·BAx       W for all rows, then A and B

No number of the adapter reaches a draft's row.

Knows rows only; models/gated.py reads an adapter from its files.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from infer.engine.attention import ProbeGate, add_product
from infer.engine.packed import JointLinear


class GatedLinear(nn.Module):
    """Wx for drafts and Wx + s·BAx for probes.

    `base` is W with its bias, `a` (r, d) and `b` (d', r) are the adapter. If W's columns
    are divided over ranks, so are A's, and `group` sums Ax.
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
        # Transposed in memory, as the products read them.
        self.a = _frozen(a.T.contiguous().T)
        self.b = _frozen((b * scaling).T.contiguous().T)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, q, d) to (B, q, d'); in some families (B·q, d) to (B·q, d')."""
        if isinstance(self.base, JointLinear):
            adapted = self.base.adapted(x, self.gate)
            if adapted is not None:
                return adapted
        y: Tensor = self.base(x)
        if self.gate.rows:
            # Two-dimensional operands: otherwise PyTorch copies the weight for each sequence.
            inner = x.reshape(-1, x.shape[-1]) @ self.a.T
            if self.group is not None:
                dist.all_reduce(inner, group=self.group)
            add_product(self.gate.probes(y), self.gate.probes(inner), self.b.T)
        return y


class GatedEmbedding(nn.Module):
    """The base model's embeddings; for probes the adapter's `rows` (n, d) of `ids` (n,).

    Gemma's embedding multiplies its rows, and so the adapter's.
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
        """The base model's weight, which Transformers reads."""
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


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
