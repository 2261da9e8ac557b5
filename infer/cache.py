"""The key-value cache: allocated once, appended to by a forward, committed by one copy.

    kv   (2, layers, 1, heads, capacity, head_dim), keys and values of all layers in one tensor

A forward writes the rows of its tree after the committed ones; `commit` keeps the rows of
the accepted path and forgets the others. Knows Transformers' cache protocol; no tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin


class TreeCacheLayer(CacheLayerMixin):
    """One layer's view of the tensor."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (1, heads, q, head_dim) after the committed rows; all rows so far are returned."""
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is lazy here."""

    def get_seq_length(self) -> int:
        """Committed rows."""
        return self.length

    def get_max_length(self) -> int:
        """Capacity in rows."""
        assert self.keys is not None
        return self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys visible to a forward of `query_length` rows, and their offset."""
        return self.length + query_length, 0


class TreeCache(Cache):
    """All layers; `length` committed rows out of `capacity`."""

    def __init__(
        self, config: PretrainedConfig, *, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (2, config.num_hidden_layers, 1, heads, capacity, head_dim)
        self._kv = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = [TreeCacheLayer(keys, values) for keys, values in zip(*self._kv, strict=True)]
        super().__init__(layers=list(self._layers))
        self.capacity = capacity
        self._set_length(0)

    def _set_length(self, length: int) -> None:
        self.length = length
        for layer in self._layers:
            layer.length = length

    def commit(self, path: Sequence[int]) -> None:
        """Keep these rows of the last forward, in this order; path[0] is 0, the root."""
        start, count = self.length, len(path)
        if path[-1] != count - 1:  # a path that is not the first rows: gather it, all layers at once
            rows = torch.tensor(path, device=self._kv.device) + start
            self._kv[..., start : start + count, :] = self._kv[..., rows, :]
        self._set_length(start + count)

    def clear(self) -> None:
        """Forget every row."""
        self._set_length(0)
