"""Cache the trunks of a gated adapter, which training does not change.

The branches of a sequence attend to keys and values of the base model, and learn from its
hidden states. These are the same in every epoch, whatever windows are drawn. Each trunk
is computed in a pass of its own, so that its values depend on the sequence alone: a resumed
run computes it again and gets the same bits.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from conf.devices.memory import GIB, machine_memory
from train.attention import TrunkKeys
from train.config import TrainConfig

# The (r, n, d) last hidden states, and the keys and values of all layers.
Trunk = tuple[Tensor, TrunkKeys]
MEMORY_SHARE = 0.25  # share of the machine's free memory for the caches of all ranks


class TrunkCache:
    """A cache of the first trunks that fit into `limit` bytes.

    Trunks are never evicted. Each epoch visits every sequence once, so a cache of recent
    trunks would have fewer hits.
    """

    def __init__(self, limit: float) -> None:
        self._free = limit
        self._trunks: dict[bytes, Trunk] = {}

    def get(
        self, ids: Tensor, positions: Tensor, compute: Callable[[Tensor, Tensor], Trunk]
    ) -> Trunk:
        """Return the trunk of (r, n) ids at positions 0 to n - 1; `compute` is called for uncached ones."""
        trunks = [
            self._get(ids[row : row + 1], positions[row : row + 1], compute)
            for row in range(len(ids))
        ]
        if len(trunks) == 1:
            return trunks[0]
        hidden, parts = zip(*trunks, strict=True)
        joined = TrunkKeys()
        for layer in parts[0].by_layer:
            keys, values = zip(*(part.by_layer[layer] for part in parts), strict=True)
            joined.by_layer[layer] = torch.cat(keys), torch.cat(values)
        return torch.cat(hidden), joined

    def _get(
        self, ids: Tensor, positions: Tensor, compute: Callable[[Tensor, Tensor], Trunk]
    ) -> Trunk:
        key = ids.numpy().tobytes()
        if key in self._trunks:
            return self._trunks[key]
        hidden, keys = trunk = compute(ids, positions)
        pairs = keys.by_layer.values()
        tensors = [hidden, *(tensor for pair in pairs for tensor in pair)]
        size = sum(tensor.nbytes for tensor in tensors)
        if size <= self._free:
            self._free -= size
            self._trunks[key] = trunk
        return trunk


def trunk_cache(config: TrainConfig) -> TrunkCache | None:
    """Return a cache if a gated adapter trains on a CPU, else None."""
    gated = config.lora.gated and config.trunk_cache
    if not gated or torch.cuda.is_available():
        return None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free, _ = machine_memory()
    return TrunkCache(min(config.trunk_cache * GIB, MEMORY_SHARE * free / ranks))
