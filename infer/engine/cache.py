"""The key-value cache, allocated once. A forward appends rows, and a commit copies them.

    kv   (2, layers, B, heads, capacity, width), keys and values of all layers

If keys and values differ in width, the narrower ones do not use the end of each row.

Every sequence has its own length. A forward writes the rows of its tree after the
committed rows. `commit` keeps the rows of the accepted path and drops the other rows of
the tree. The cache implements Transformers' cache protocol and stores no tokens.
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
    #: (B, q), the column of each row; None: the rows fill the columns `start` to `end`.
    columns: Tensor | None = None
    sequences: Tensor | None = None  # (B, 1): 0, 1, ...

    def of_rows(self, batch: int) -> Tensor:
        """Return the column of each row (B, q) of `batch` sequences."""
        if self.columns is not None:
            return self.columns
        return torch.arange(self.start, self.end).repeat(batch, 1)


class TreeCacheLayer(CacheLayerMixin):
    """The keys and values of one layer, as views of the cache's tensor."""

    #: So the library does not make masks itself when it compiles.
    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, slots: Slots) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: Tensor = keys
        self.values: Tensor = values
        self.slots = slots
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (B, heads, q, width) to the slots; return the columns up to the slots' end."""
        slots = self.slots
        n = key_states.shape[0]
        rows = slots.end - slots.start
        keys, values = self.keys, self.values
        if n < len(keys):
            keys, values = keys[:n], values[:n]
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
        """Return the number of cached columns before the columns that the next forward writes."""
        return self.slots.start

    def get_max_length(self) -> int:
        """Return the capacity in columns."""
        return self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys in use by a forward, and the offset of the first key."""
        return self.slots.end, 0


class TreeCache(Cache):
    """The cache of up to `batch` sequences; `lengths[b]` rows of sequence b are committed."""

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
        """Drop all rows and start `sequences` new sequences.

        Attention reads the rows after a text with weight 0, and 0 times NaN is NaN. So values
        that overflowed must be cleared with their text.
        """
        if self._used:
            self._kv.zero_()
        self._used = True
        self.lengths = [0] * sequences

    def clear_rest(self, fed: Sequence[int] | None = None) -> None:
        """Zero all rows after the committed rows and `fed[b]` uncommitted rows; see `clear`."""
        used = [sum(pair) for pair in zip(self.lengths, fed or [0] * len(self.lengths))]
        for b in range(self._kv.shape[2]):
            self._kv[:, :, b, :, used[b] if b < len(used) else 0 :] = 0

    def set_slots(self, rows: int, fed: Sequence[int] | None = None) -> None:
        """Set the slots of the next forward, `rows` for each sequence.

        The slots follow the committed rows and `fed[b]` uncommitted rows.
        """
        starts = list(self.lengths)
        for b, before in enumerate(fed or ()):
            starts[b] += before
        first = min(starts)
        if first == max(starts):
            self._update_slots(first, first + rows)
        else:
            starts_B = torch.tensor(starts, device=self._kv.device)
            self.set_slots_at(starts_B, rows=rows, end=max(starts) + rows)
            self.slots.start = first

    def set_slots_at(self, starts_B: Tensor, *, rows: int, end: int) -> None:
        """Set the slots of each sequence from a tensor of starting columns (B,).

        A CUDA graph can be replayed with other starts. `end` is the last column that is read,
        plus 1.
        """
        device = self._kv.device
        columns = starts_B[:, None] + torch.arange(rows, device=device)
        self._update_slots(0, end, columns)
        self.slots.sequences = torch.arange(len(starts_B), device=device)[:, None]

    def _update_slots(
        self, start: int, end: int, columns: Tensor | None = None
    ) -> None:
        self.slots.start = start
        self.slots.end = end
        self.slots.columns = columns

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep these rows of each sequence's tree, in this order, after the committed rows."""
        for b, path in enumerate(paths):
            start = self.lengths[b]
            end = start + len(path)
            if path and path[-1] != len(path) - 1:
                rows = torch.tensor(path, device=self._kv.device) + start
                kv = self._kv[:, :, b]
                kv[:, :, :, start:end] = kv[:, :, :, rows]
            self.lengths[b] = end

    def drop(self, b: int) -> None:
        """Remove sequence b; the last sequence gets its index."""
        last = len(self.lengths) - 1
        if b != last:
            self._kv[:, :, b] = self._kv[:, :, last]  # all rows, see `clear`
            self.lengths[b] = self.lengths[last]
        self.lengths.pop()
