"""Layers on which an adapter acts on probes alone, so that plain decoding is the base model's, in speed too.

Knows rows; knows no tree, no tokens, and nothing of how an adapter is read (adapter.py).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

CLOSED = sys.maxsize


class ProbeGate:
    """The first row of the current forward on which the adapter acts; none outside of `open`."""

    def __init__(self) -> None:
        self.first = CLOSED

    @classmethod
    def of(cls, lm: nn.Module) -> "ProbeGate":
        """The gate of a model's adapter; for a model without one, a gate on nothing."""
        return next((m.gate for m in lm.modules() if isinstance(m, GatedLinear)), cls())

    @contextmanager
    def open(self, first: int) -> Iterator[None]:
        """For the rows from `first` on, while the block lasts."""
        self.first = first
        try:
            yield
        finally:
            self.first = CLOSED


class GatedLinear(nn.Module):
    """Wx + s·BAx on (1, q, d) for the rows behind the gate, Wx for the others; `base` is W, `a` A, `b` B."""

    def __init__(self, base: nn.Module, a: nn.Module, b: nn.Module, scaling: float, gate: ProbeGate) -> None:
        super().__init__()
        self.base, self.a, self.b = base, a, b
        self.scaling, self.gate = scaling, gate

    def forward(self, x: Tensor) -> Tensor:
        """(1, q, d) in, (1, q, d') out."""
        y = self.base(x)
        first = self.gate.first
        if first < x.shape[1]:
            y[:, first:] += self.b(self.a(x[:, first:])) * self.scaling
        return y


class GatedEmbedding(nn.Module):
    """The adapter's own rows for the ids behind the gate, the base model's for the others."""

    def __init__(self, base: nn.Module, adapted: nn.Module, gate: ProbeGate) -> None:
        super().__init__()
        self.base, self.adapted, self.gate = base, adapted, gate

    def forward(self, ids: Tensor) -> Tensor:
        """(1, q) in, (1, q, d) out."""
        first = self.gate.first
        if first >= ids.shape[1]:
            return self.base(ids)
        return torch.cat([self.base(ids[:, :first]), self.adapted(ids[:, first:])], dim=1)
