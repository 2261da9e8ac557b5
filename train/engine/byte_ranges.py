"""Tensors in PyTorch's files as ranges of bytes: found without reading them, read without holding the file.

Not by memory map: pages that were touched stay with the process and count as its memory. Knows
no names and no ranks: what the ranges make is train.export.weights'.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from conf import UserError
from train.engine.checkpoint import why_unread

BLOCK = 2**22  # numbers that are held beside the result while their type changes


class _Unread:
    """Stands for an object of DeepSpeed's that says nothing of weights: loading it needs no DeepSpeed."""


# All that our checkpoints hold beside tensors and plain values; a pickle of anything else is refused.
KNOWN: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Unread, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Unread, "deepspeed.utils.tensor_fragment.fragment_address"),
]


@dataclass(frozen=True)
class ByteRange:
    """`count` numbers of type `dtype` from byte `start` of a file on."""

    path: Path
    start: int
    dtype: torch.dtype
    count: int


def index(path: Path) -> Any:
    """What `torch.save` wrote into a file, with tensors that know their place in it and hold no data.

    Raises UserError for a file that holds more than tensors and what is KNOWN.
    """
    try:
        with torch.serialization.safe_globals(KNOWN), FakeTensorMode():
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever PyTorch meets first in a file that is none of ours
        raise UserError(
            f"{path}: wanted a file as DeepSpeed 0.19 writes it, found {why_unread(error)}"
        ) from error


def locate(path: Path, tensor: Tensor) -> ByteRange:
    """Where a tensor of an `index` lies. Raises ValueError for one that is not in one piece."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} with gaps")
    storage: Any = tensor.untyped_storage()
    start = storage._checkpoint_offset + int(tensor.storage_offset()) * tensor.itemsize
    return ByteRange(path, start, tensor.dtype, tensor.numel())


def cut(ranges: Sequence[ByteRange], start: int, count: int) -> list[ByteRange]:
    """The numbers `start` to `start + count` of the vector that the ranges make, end to end.

    Raises ValueError when it is shorter.
    """
    found, begin = [], 0
    for one in ranges:
        first, last = max(start - begin, 0), min(start + count - begin, one.count)
        if first < last:
            found.append(replace(one, start=one.start + first * one.dtype.itemsize, count=last - first))
        begin += one.count
    if sum(one.count for one in found) != count:
        raise ValueError(f"wanted {count} numbers from {start} on, found {begin} in all")
    return found


def read(ranges: Sequence[ByteRange], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The ranges end to end, as one tensor of a shape and a type; beside it at most BLOCK numbers are held.

    Raises UserError when a file ends before its piece does.
    """
    whole = torch.empty(math.prod(shape), dtype=dtype)
    at = 0
    for one in ranges:
        with open(one.path, "rb", buffering=0) as file:
            file.seek(one.start)
            for place in whole[at : at + one.count].split(BLOCK):
                part = place if one.dtype == dtype else torch.empty(len(place), dtype=one.dtype)
                wanted = part.view(torch.uint8).numpy().data
                if file.readinto(wanted) != len(wanted):
                    raise UserError(
                        f"{one.path}: wanted {one.count} numbers at byte {one.start}, found its end"
                    )
                if part is not place:
                    place.copy_(part)
        at += one.count
    return whole.view(*shape)
