"""What the ranks of a run tell each other, by PyTorch's collectives. Knows neither DeepSpeed nor what is told.

Every function but `is_lost_rank` is called by every rank.
"""

from typing import Any

import torch


def world_size() -> int:
    """The number of ranks."""
    return torch.distributed.get_world_size()


def first_ranks(value: Any) -> Any:
    """What rank 0 gives, on every rank."""
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def every_ranks(value: Any) -> list[Any]:
    """What each rank gives, in their order, on every rank."""
    values = [None] * world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone."""
    return isinstance(error, torch.distributed.DistBackendError) or "gloo" in str(error)
