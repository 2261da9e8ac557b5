"""The weights of a checkpoint of any ZeRO stage and any number of ranks, each read when it is asked for.

What is trained is read in float32, as the optimizer has it; what is frozen as the model has it. Where it lies:

    stage 0      by name in the model's file, and the optimizer's float32 copies by group beside it
                 where the model itself is in bfloat16
    stages 1, 2  a group of parameters is one vector, of which every rank has a part:

                     group 0   |a a a b b|b c c · ·|       · fills up the last part
                                 rank 0    rank 1

    stage 3      every rank has a part of every weight:

                     rank 0    |a a·|b b|c|                the groups one after another
                     rank 1    |a ·|b ·|c|                 · fills up the last rank's part of a weight

Knows the files of train.engine's checkpoints; needs neither DeepSpeed nor a model.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conf import UserError
from conf.errors import Refusing
from train.checkpoint import SHARD, ByteRange, cut, index, locate, read

MODEL = "model_states.pt"  # how the name of a file ends that holds the model's own copy, or a rank's share

PLACE = "lm."  # of the library's model within train.model.AdaptiveLM


class Stored(NamedTuple):
    """A weight's shape, and the ranges that hold its numbers in their order."""

    shape: tuple[int, ...]
    ranges: list[ByteRange]


class CheckpointWeights(Mapping[str, Tensor]):
    """(shape) tensors of a checkpoint folder in `dtype`, by the parameter's name in the library's model.

    Raises UserError for files that hold more than tensors and plain values, and where float32 weights were
    trained that cannot be told from each other, unless bfloat16 is asked for: of that the model has copies.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        with Refusing(f"{folder} must hold files as train writes them, got", ". Use another checkpoint."):
            found = _stored(folder, copies=dtype == torch.bfloat16)
        self._stored = {name.removeprefix(PLACE): stored for name, stored in found.items()}

    def __getitem__(self, name: str) -> Tensor:
        stored = self._stored[name]
        return read(stored.ranges, stored.shape, self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all weights, by name; none is read."""
        return {name: stored.shape for name, stored in self._stored.items()}


def _stored(folder: Path, *, copies: bool) -> dict[str, Stored]:
    models = {path: index(path) for path in _by_rank(folder, MODEL)}
    optimizers = {path: index(path)["optimizer_state_dict"] for path in _by_rank(folder, SHARD)}
    if not models:
        raise ValueError(f"no file that ends in {MODEL}")
    path, model = next(iter(models.items()))
    # Stage 3 leaves empty tensors where a weight was.
    own = {
        name: Stored(tuple(tensor.shape), [locate(path, tensor)])
        for name, tensor in model["module"].items()
        if tensor.numel()
    }
    if not optimizers:
        trained = _named(path, model, copies=copies)
    elif "fp32_flat_groups" in next(iter(optimizers.values())):
        trained = _frozen(models) | _divided(model["param_shapes"], optimizers)
    else:
        trained = _flattened(model["param_shapes"], optimizers)
    # A weight that two modules share is trained under one of its names.
    shared = dict(model["shared_params"] or {})
    first = {own[name].ranges[0]: name for name in trained if name in own}
    shared |= {name: first[one.ranges[0]] for name, one in own.items() if one.ranges[0] in first}
    return own | trained | {alias: trained[name] for alias, name in shared.items() if name in trained}


def _by_rank(folder: Path, ending: str) -> list[Path]:
    return sorted(folder.glob(f"*{ending}"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])


def _named(path: Path, model: Mapping[str, Any], *, copies: bool) -> dict[str, Stored]:
    """Stage 0: the float32 weights of a model in bfloat16, by the names that the engine writes with them.

    Without the names nothing is found where the model's own `copies` are enough, and else UserError raised.
    """
    groups = (model["optimizer"] or {}).get("fp32_groups", [])
    if groups and "trained" not in model:
        if copies:
            return {}
        raise UserError(
            f"{path}: wanted the names of the float32 weights in it, found none, as a training of an earlier "
            "version wrote it: only dtype=bfloat16 can be exported, an adapter with lora=kept"
        )
    return {
        name: Stored(tuple(tensor.shape), [locate(path, tensor)])
        for names, tensors in zip(model.get("trained", []), groups, strict=bool(groups))
        for name, tensor in zip(names, tensors, strict=True)
    }


def _flattened(groups: Sequence[Mapping[str, Any]], ranks: Mapping[Path, Any]) -> dict[str, Stored]:
    """Stages 1 and 2."""
    found: dict[str, Stored] = {}
    paddings = next(iter(ranks.values())).get("param_alignment_paddings")
    for number, shapes in enumerate(groups):
        vector = [locate(path, rank["single_partition_of_fp32_groups"][number]) for path, rank in ranks.items()]
        start = 0
        for place, (name, shape) in enumerate(shapes.items()):
            count = math.prod(shape)
            found[name] = Stored(tuple(shape), cut(vector, start, count))
            start += count + (paddings[number][place] if paddings else 0)
    return found


def _divided(groups: Sequence[Mapping[str, Any]], ranks: Mapping[Path, Any]) -> dict[str, Stored]:
    """Stage 3."""
    vectors = [[locate(path, group) for group in rank["fp32_flat_groups"]] for path, rank in ranks.items()]
    found: dict[str, Stored] = {}
    start = 0
    for name, shape in (item for shapes in groups for item in shapes.items()):
        share = -(-math.prod(shape) // len(ranks))
        parts = [part for vector in vectors for part in cut(vector, start, share)]
        found[name] = Stored(tuple(shape), cut(parts, 0, math.prod(shape)))
        start += share
    return found


def _frozen(models: Mapping[Path, Any]) -> dict[str, Stored]:
    """Stage 3: what is not trained, which no optimizer has."""
    first = next(iter(models.values()))
    found: dict[str, Stored] = {}
    for name, shape in (first["frozen_param_shapes"] or {}).items():
        parts = [locate(path, model["frozen_param_fragments"][name]) for path, model in models.items()]
        found[name] = Stored(tuple(shape), cut(parts, 0, math.prod(shape)))
    return found
