"""Whether a model is divided over several ranks, and how these come to agree.

Ranks that chose differently would wait for each other for ever; so whatever decides (picks, drafts, costs) is
rank 0's on every rank, and no kernel's rounding can part them. A draft model is whole on every rank: what it
drafts is rank 0's too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from conf.errors import UserError

T = TypeVar("T")


def shares(lm: PreTrainedModel) -> int:
    """Over how many ranks a model is divided."""
    return lm.tp_size or 1


def agreement(lm: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return a function that gives every rank the tensor of rank 0."""

    def agreed(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, 0)
        return tensor

    return agreed if shares(lm) > 1 else lambda tensor: tensor


def agreed_value(lm: PreTrainedModel, value: T) -> T:
    """Rank 0's value on every rank."""
    if shares(lm) == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


@contextmanager
def failing_together(lm: PreTrainedModel) -> Iterator[None]:
    """Raise on every rank the UserError of the first rank that meets one in the block.

    A rank that failed alone would leave the others waiting, and torchrun would end them without a sentence.
    """
    error: UserError | None = None
    try:
        yield
    except UserError as caught:
        error = caught
    errors: list[UserError | None] = [error]
    if shares(lm) > 1:
        errors *= shares(lm)
        dist.all_gather_object(errors, error)
    for error in errors:
        if error is not None:
            raise error
