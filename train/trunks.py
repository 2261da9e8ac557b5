"""Trunks of a gated adapter, computed once: no training changes them.

The branches of a sequence attend to keys and values of the base model, and learn from its
hidden states. A sequence that is trained on again has the same ones, whatever its windows.
A trunk is computed alone, so that its values are a function of the sequence: a resumed
run, which computes it anew, gets the same bits.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from conf.architecture import attention_dropout
from conf.devices.memory import GIB, machine_memory
from train.attention import TrunkKeys
from train.config import TrainConfig

Trunk = tuple[Tensor, TrunkKeys]  # (r, n, d) last hidden states, and all layers' keys
SHARE = 0.25  # of the machine's free memory that the caches of all ranks may take


class TrunkCache:
    """The first trunks that fit into `limit` bytes.

    None is dropped: an order that visits each sequence once in an epoch finds more of
    the first ones than of the last ones.
    """

    def __init__(self, limit: float) -> None:
        self._free = limit
        self._trunks: dict[bytes, Trunk] = {}

    def get(
        self, ids: Tensor, positions: Tensor, compute: Callable[[Tensor, Tensor], Trunk]
    ) -> Trunk:
        """Return the trunk of (r, n) ids at positions 0 to n-1; `compute` returns one."""
        trunks = [
            self._get(ids[row : row + 1], positions[row : row + 1], compute)
            for row in range(len(ids))
        ]
        if len(trunks) == 1:
            return trunks[0]
        hidden, keys = zip(*trunks, strict=True)
        joined = {
            layer: tuple(
                map(torch.cat, zip(*(own[layer] for own in keys), strict=True))
            )
            for layer in keys[0]
        }
        return torch.cat(hidden), joined  # type: ignore[return-value]

    def _get(
        self, ids: Tensor, positions: Tensor, compute: Callable[[Tensor, Tensor], Trunk]
    ) -> Trunk:
        name = ids.numpy().tobytes()
        if name in self._trunks:
            return self._trunks[name]
        hidden, keys = trunk = compute(ids, positions)
        tensors = [hidden, *(tensor for pair in keys.values() for tensor in pair)]
        size = sum(tensor.nbytes for tensor in tensors)
        if size <= self._free:
            self._free -= size
            self._trunks[name] = trunk
        return trunk


def trunk_cache(lm: nn.Module, config: TrainConfig) -> TrunkCache | None:
    """Return the cache for a gated adapter's training on a CPU, else None.

    Dropout makes another trunk each time.
    """
    dropout = attention_dropout(lm.config) or any(
        module.p
        for name, module in lm.named_modules()
        if isinstance(module, nn.Dropout) and "lora_dropout" not in name
    )
    if not config.lora.gated or not config.trunk_cache or dropout:
        return None
    if torch.cuda.is_available():
        return None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free, _ = machine_memory()
    return TrunkCache(min(config.trunk_cache * GIB, SHARE * free / ranks))
