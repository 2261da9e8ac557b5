"""The key-value cache: allocated once, appended to by a forward, committed by one copy.

    kv   (2, layers, B, heads, capacity, head_dim), keys and values of all layers in one tensor

Every sequence has its own length. A forward writes the rows of its tree after the committed ones;
`commit` keeps the rows of the accepted path and forgets the others. Knows Transformers' cache
protocol; no tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin


@dataclass
class Slots:
    """Where the rows of the next forward go; one object, shared by all layers."""

    start: int = 0
    end: int = 0
    columns: Tensor | None = (
        None  # (B, q) of each row; None: all rows go to columns `start` to `end`
    )
    sequences: Tensor | None = None  # (B, 1): 0, 1, ...


class TreeCacheLayer(CacheLayerMixin):
    """One layer's view of the tensor."""

    is_compileable = (
        True  # the library then leaves the masks to the caller when it compiles
    )

    def __init__(self, keys: Tensor, values: Tensor, slots: Slots) -> None:
        super().__init__()
        self.keys = keys
        self.values = values
        self.slots = slots
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (B, heads, q, head_dim) into the slots; the columns up to their end are returned."""
        assert self.keys is not None and self.values is not None
        slots = self.slots
        n = key_states.shape[0]
        if slots.columns is None:
            self.keys[:n, :, slots.start : slots.end] = key_states
            self.values[:n, :, slots.start : slots.end] = value_states
        else:
            self.keys[slots.sequences, :, slots.columns] = key_states.transpose(1, 2)
            self.values[slots.sequences, :, slots.columns] = value_states.transpose(
                1, 2
            )
        return self.keys[:n, :, : slots.end], self.values[:n, :, : slots.end]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """No-op: storage is preallocated."""

    def get_seq_length(self) -> int:
        """Return the number of columns before the slots."""
        return self.slots.start

    def get_max_length(self) -> int:
        """Return the capacity in rows."""
        assert self.keys is not None
        return self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the keys visible to a forward of `query_length` rows, and their offset."""
        return self.slots.end, 0


class TreeCache(Cache):
    """All layers of up to `batch` sequences; `lengths[b]` committed rows out of `capacity`."""

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        shares: int = 1,
    ) -> None:
        self._kv = torch.zeros(
            shape(config, batch, capacity, shares), dtype=dtype, device=device
        )
        self.slots = Slots()
        super().__init__(
            layers=[
                TreeCacheLayer(keys, values, self.slots)
                for keys, values in zip(*self._kv)
            ]
        )
        self.capacity = capacity
        self.lengths: list[int] = []
        self._used = False

    def clear(self, sequences: int) -> None:
        """Forget every row, for so many sequences. Fixed shapes and batches look at columns behind a text with
        weight 0, and 0 times what is no number is none: an overflow must not outlive its text.
        """
        if self._used:
            self._kv.zero_()
        self._used = True
        self.lengths = [0] * sequences

    def place(self, rows: int, fed: Sequence[int] | None = None) -> None:
        """Set the slots of the next forward: `rows` of each sequence, behind `fed[b]` uncommitted ones."""
        slots = self.slots
        device = self._kv.device
        starts = [
            length + before
            for length, before in zip(self.lengths, fed or [0] * len(self.lengths))
        ]
        slots.start = min(starts)
        slots.end = max(starts) + rows
        slots.columns = slots.sequences = None
        if (
            slots.end > slots.start + rows
        ):  # unequal: each sequence's rows follow its own
            slots.columns = torch.tensor(starts, device=device)[:, None] + torch.arange(
                rows, device=device
            )
            slots.sequences = torch.arange(len(starts), device=device)[:, None]

    def place_each(self, starts_B: Tensor, *, rows: int, end: int) -> None:
        """Do the same on the device, for a forward that is replayed with other starts."""
        slots = self.slots
        device = self._kv.device
        slots.start = 0
        slots.end = end
        slots.columns = starts_B[:, None] + torch.arange(rows, device=device)
        slots.sequences = torch.arange(len(starts_B), device=device)[:, None]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep these rows of each sequence behind the committed ones, in this order."""
        if any(path and path[-1] != len(path) - 1 for path in paths):
            self._gather(paths)
        for b, path in enumerate(paths):
            self.lengths[b] += len(path)

    def _gather(self, paths: Sequence[Sequence[int]]) -> None:
        """Copy all layers at once; a shorter path is filled up with rows that stay where they are."""
        width = max(map(len, paths))
        rows = [[*path, *range(len(path), width)] for path in paths]
        device = self._kv.device
        if len(paths) == 1:
            start = self.lengths[0]
            source = torch.tensor(rows[0], device=device) + start
            self._kv[:, :, 0, :, start : start + width] = self._kv[:, :, 0][
                :, :, :, source
            ]
            return
        lengths = torch.tensor(self.lengths, device=device)[:, None]
        sequences = torch.arange(len(paths), device=device)[:, None]
        source = lengths + torch.tensor(rows, device=device)
        target = lengths + torch.arange(width, device=device)
        self._kv[:, :, sequences, :, target] = self._kv[:, :, sequences, :, source]

    def drop(self, b: int) -> None:
        """Forget a sequence; the last one takes its place."""
        last = len(self.lengths) - 1
        if b != last:
            self._kv[:, :, b] = self._kv[
                :, :, last
            ]  # whole: what lay behind was the forgotten one's
            self.lengths[b] = self.lengths[last]
        self.lengths.pop()


def shape(
    config: PretrainedConfig, batch: int, capacity: int, shares: int = 1
) -> tuple[int, ...]:
    """Return the shape of the cache's tensor, for one of `shares` of the model's heads."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = (
        getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    return (2, config.num_hidden_layers, batch, heads // shares, capacity, head_dim)
