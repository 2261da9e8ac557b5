"""Layers on which an adapter acts on probes alone, so that all other rows are the base model's, in speed too.

    rows            drafts            probes
                    0 .. first - 1    first .. q - 1
    low rank        Wx                Wx + s·BAx       one product of W for all rows, then A and B
    dense           Wx                W'x              W' = W + s·BA beside W: one product for each part

Two small products cost more than one of their sum where the rank is large for the layer, so a layer keeps W'
if A and B have at least `DENSE` of W's numbers. Either way no number of the adapter reaches a draft's row.

Knows rows; knows no tree, no tokens, and nothing of how an adapter is read (models/gated.py).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from infer.engine.attention import ProbeGate

DENSE = 0.5  # A's and B's share of W's numbers from which W' is kept


class GatedLinear(nn.Module):
    """Wx for drafts, Wx + s·BAx for probes; `base` is W with its bias, `a` (r, d) and `b` (d', r) the adapter.

    Where W is divided over ranks by its columns, so is A, and `group` adds up Ax.
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
        if (
            type(base) is nn.Linear
            and not divided
            and a.numel() + b.numel() >= DENSE * base.weight.numel()
        ):
            update = scaling * (b.float() @ a.float())
            self.dense = _frozen(
                (base.weight.detach().float() + update).to(base.weight.dtype)
            )
        else:
            self.a = _frozen(a)
            self.b = _frozen(b * scaling)

    @property
    def adapter(self) -> list[nn.Parameter]:
        """The weights that are read for probes alone."""
        return [weight for weight in (self.dense, self.a, self.b) if weight is not None]

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, q, d) to (B, q, d'); of some families (B·q, d) to (B·q, d')."""
        q = self.gate.rows
        first = self.gate.first
        if not q:
            return self.base(x)
        # Products are of matrices: of a slice in three dimensions PyTorch multiplies copies of the weight.
        rows = x.reshape(-1, x.shape[-1])
        if self.dense is not None:
            y = self._split(rows, first, q)
        else:
            y = self.base(rows)
            y.view(-1, q, y.shape[-1])[:, first:] += self._update(
                rows.view(-1, q, rows.shape[-1])[:, first:]
            )
        return y.view(*x.shape[:-1], -1)

    def _split(self, rows: Tensor, first: int, q: int) -> Tensor:
        assert self.dense is not None
        bias: Any = self.base.bias
        if len(rows) == q:
            drafts, probes = rows.split((first, q - first))
            return torch.cat((self.base(drafts), F.linear(probes, self.dense, bias)))
        parts = rows.view(-1, q, rows.shape[-1]).split((first, q - first), dim=1)
        ours, theirs = (part.flatten(0, 1) for part in parts)
        products = self.base(ours), F.linear(theirs, self.dense, bias)
        return torch.cat(
            [y.view(*part.shape[:2], -1) for y, part in zip(products, parts)], dim=1
        ).flatten(0, 1)

    def _update(self, probes: Tensor) -> Tensor:
        assert self.a is not None and self.b is not None
        inner = F.linear(probes.flatten(0, 1), self.a)
        if self.group is not None:
            dist.all_reduce(inner, group=self.group)
        return F.linear(inner, self.b).view(*probes.shape[:2], -1)


class GatedEmbedding(nn.Module):
    """The base model's embeddings; for probes those of `ids` (n,) are `rows` (n, d) of the adapter."""

    def __init__(
        self, base: nn.Embedding, ids: Tensor, rows: Tensor, gate: ProbeGate
    ) -> None:
        super().__init__()
        self.base = base
        self.gate = gate
        self.rows = _frozen(rows)
        places = torch.full((base.num_embeddings,), -1, device=ids.device)
        places[ids] = torch.arange(len(ids), device=ids.device)
        self.register_buffer("places", places, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The base model's, as the library looks it up."""
        return self.base.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Embed (B, q) ids as (B, q, d)."""
        y = self.base(ids)
        first = self.gate.first
        if self.gate.rows:
            places = self.places[ids[:, first:]]  # type: ignore[index]
            own = F.embedding(places.clamp(min=0), self.rows)
            y[:, first:] = torch.where(places[..., None] < 0, y[:, first:], own)
        return y


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
