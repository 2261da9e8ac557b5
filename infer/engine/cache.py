"""The key-value cache: allocated once, appended to by a forward, committed by a copy.

    kv   (2, layers, B, heads, capacity, width), keys and values of all layers

The narrower of keys and values leave the end of each row unused.

Every sequence has its own length. A forward writes the rows of its tree after the
committed ones. `commit` keeps the rows of the accepted path and forgets the others.
Implements Transformers' cache protocol; knows no tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin

from conf.architecture import cache_sizes


@dataclass
class Slots:
    """The columns that the next forward writes; all layers share one object."""

    start: int = 0
    end: int = 0
    #: (B, q), the column of each row; None: all rows go to columns `start` to `end`.
    columns: Tensor | None = None
    sequences: Tensor | None = None  # (B, 1): 0, 1, ...


class TreeCacheLayer(CacheLayerMixin):
    """One layer's view of the tensor."""

    is_compileable = True  # then the library leaves masks to the caller when compiling

    def __init__(self, keys: Tensor, values: Tensor, slots: Slots) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: Tensor = keys
        self.values: Tensor = values
        self.slots = slots
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (B, heads, q, width) to the slots; return the columns up to their end."""
        slots = self.slots
        n = key_states.shape[0]
        rows = slots.end - slots.start
        keys, values = (t.narrow(0, 0, n) for t in (self.keys, self.values))
        for cached, states in ((keys, key_states), (values, value_states)):
            if slots.columns is None:
                cached.narrow(2, slots.start, rows).copy_(states)
            else:
                rows_first = states.transpose(1, 2).to(cached.dtype)
                cached[slots.sequences, :, slots.columns] = rows_first
        return keys.narrow(2, 0, slots.end), values.narrow(2, 0, slots.end)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """No-op: storage is preallocated."""

    def get_seq_length(self) -> int:
        """Return the number of columns before the slots."""
        return self.slots.start

    def get_max_length(self) -> int:
        """Return the capacity in rows."""
        return self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the keys visible to a forward of `query_length` rows, and their offset."""
        return self.slots.end, 0


class TreeCache(Cache):
    """All layers of up to `batch` sequences; `lengths[b]` rows are committed."""

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
        heads, key_width, value_width = cache_sizes(config)
        width = max(key_width, value_width)
        sizes = config.num_hidden_layers, batch, heads // shares, capacity, width
        self._kv = torch.zeros(2, *sizes, dtype=dtype, device=device)
        self._used = False
        self.slots = Slots()
        self.capacity = capacity
        self.lengths: list[int] = []
        super().__init__(
            layers=[
                TreeCacheLayer(k[..., :key_width], v[..., :value_width], self.slots)
                for k, v in zip(*self._kv)
            ]
        )

    def clear(self, sequences: int) -> None:
        """Forget all rows and start `sequences` new sequences.

        Rows after a text are read with weight 0, and 0 times NaN is NaN: values that
        overflowed must not outlive their text.
        """
        if self._used:
            self._kv.zero_()
        self._used = True
        self.lengths = [0] * sequences

    def clear_rest(self, fed: Sequence[int] | None = None) -> None:
        """Clear all but the committed rows and `fed[b]` uncommitted ones after them; see `clear`."""
        used = [sum(pair) for pair in zip(self.lengths, fed or [0] * len(self.lengths))]
        for b in range(self._kv.shape[2]):
            self._kv[:, :, b, :, used[b] if b < len(used) else 0 :] = 0

    def place(self, rows: int, fed: Sequence[int] | None = None) -> None:
        """Set the slots of the next forward: `rows` of each sequence.

        They follow the committed rows and `fed[b]` uncommitted ones.
        """
        starts = list(self.lengths)
        for b, before in enumerate(fed or ()):
            starts[b] += before
        first = min(starts)
        if first == max(starts):
            self._set_slots(first, first + rows)
        else:
            starts_B = torch.tensor(starts, device=self._kv.device)
            self.place_each(starts_B, rows=rows, end=max(starts) + rows)
            self.slots.start = first

    def place_each(self, starts_B: Tensor, *, rows: int, end: int) -> None:
        """Do the same on the device, for a graph that is replayed with other starts."""
        device = self._kv.device
        columns = starts_B[:, None] + torch.arange(rows, device=device)
        self._set_slots(0, end, columns)
        self.slots.sequences = torch.arange(len(starts_B), device=device)[:, None]

    def _set_slots(self, start: int, end: int, columns: Tensor | None = None) -> None:
        self.slots.start = start
        self.slots.end = end
        self.slots.columns = columns

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep these rows of each sequence after the committed ones, in this order."""
        for b, path in enumerate(paths):
            start = self.lengths[b]
            end = start + len(path)
            if path and path[-1] != len(path) - 1:
                rows = torch.tensor(path, device=self._kv.device) + start
                kv = self._kv[:, :, b]
                kv[:, :, :, start:end] = kv[:, :, :, rows]
            self.lengths[b] = end

    def drop(self, b: int) -> None:
        """Forget a sequence; the last one takes its place."""
        last = len(self.lengths) - 1
        if b != last:
            self._kv[:, :, b] = self._kv[:, :, last]  # all rows, see `clear`
            self.lengths[b] = self.lengths[last]
        self.lengths.pop()
