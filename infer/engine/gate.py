"""Layers whose adapter acts on probes only; all other rows are the base model's.

    rows            drafts            probes
                    0 .. first - 1    first .. q - 1
    low rank        Wx                Wx + s·BAx       W for all rows, then A and B
    dense           Wx                W'x              W' = W + s·BA beside W

Two small products cost more than one product if the rank is large for the layer. So a
layer stores W' if A and B have at least `DENSE` of W's numbers. In both forms no number
of the adapter reaches a draft's row.

Knows rows only; models/gated.py reads an adapter from its files.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from infer.engine.attention import ProbeGate

DENSE = 0.5  # the share of W's numbers in A and B from which on W' is stored


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
        divided: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.gate = gate
        self.group = group
        self.a: nn.Parameter | None = None
        self.b: nn.Parameter | None = None
        self.dense: nn.Parameter | None = None
        large = (
            type(base) is nn.Linear
            and not divided
            and a.numel() + b.numel() >= DENSE * base.in_features * base.out_features
        )
        if large:
            weight: Any = base.weight
            sum_ = weight.float() + scaling * (b.float() @ a.float())
            self.dense = _frozen(sum_.to(weight.dtype))
        else:
            # Transposed in memory, as the products read them.
            self.a = _frozen(a.T.contiguous().T)
            self.b = _frozen((b * scaling).T.contiguous().T)

    @property
    def adapter(self) -> list[nn.Parameter]:
        """The weights that are read for probes only."""
        return [weight for weight in (self.dense, self.a, self.b) if weight is not None]

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, q, d) to (B, q, d'); in some families (B·q, d) to (B·q, d')."""
        q = self.gate.rows
        if not q:
            y: Tensor = self.base(x)
            return y
        first = self.gate.first
        # Two-dimensional operands: otherwise PyTorch copies the weight for each sequence.
        flat = x.reshape(-1, x.shape[-1])
        B = len(flat) // q
        if self.dense is not None:
            drafts, probes = flat.view(B, q, -1).tensor_split([first], dim=1)
            bias: Any = self.base.bias
            ours = self.base(drafts.flatten(0, 1))
            theirs = F.linear(probes.flatten(0, 1), self.dense, bias)
            parts = ours.unflatten(0, (B, first)), theirs.unflatten(0, (B, q - first))
            y = torch.cat(parts, dim=1)
        else:
            y = self.base(flat)
            if B == 1:  # in as few operations as possible: there are hundreds of layers
                self._update(flat[first:], y[first:])
            else:
                probes = flat.view(B, q, -1)[:, first:].flatten(0, 1)
                update = self._update(probes, y.new_zeros(len(probes), y.shape[-1]))
                y.view(B, q, -1)[:, first:] += update.view(B, q - first, -1)
        return y.view(*x.shape[:-1], -1)

    def _update(self, probes: Tensor, y: Tensor) -> Tensor:
        """Add the adapter's part of the probes to `y`."""
        assert self.a is not None and self.b is not None
        inner = probes @ self.a.T
        if self.group is not None:
            dist.all_reduce(inner, group=self.group)
        return y.addmm_(inner, self.b.T)


class GatedEmbedding(nn.Module):
    """The base model's embeddings; for probes the adapter's `rows` (n, d) of `ids` (n,)."""

    def __init__(
        self, base: nn.Embedding, ids: Tensor, rows: Tensor, gate: ProbeGate
    ) -> None:
        super().__init__()
        self.base = base
        self.gate = gate
        self.rows = _frozen(rows)
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
