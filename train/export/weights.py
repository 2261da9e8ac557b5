"""Weights of a checkpoint, read one at a time, and a model's weights in Transformers' files.

Trained weights are read in float32, as the optimizer holds them, frozen ones as the model holds them:

    stage 0      by name in the model's file; of a bfloat16 model the optimizer's float32 copies, by group
    stages 1, 2  a group of weights is one vector, divided among the ranks:

                     group 0   |a a a b b|b c c · ·|       · is padding
                                 rank 0    rank 1

    stage 3      every weight is divided among the ranks:

                     rank 0    |a a·|b b|c|                one group after another
                     rank 1    |a ·|b ·|c|                 · is padding
"""

import ctypes
import math
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from conf import UserError
from conf.errors import Refusing
from conf.files import write_json
from train.checkpoint import SHARD, cut, index, read, write_safetensors
from train.pretrained import skeleton

MODEL = "model_states.pt"  # suffix of the files with the model's own copy, or a rank's share of it
PREFIX = "lm."  # of the library's model within train.model.AdaptiveLM
PATTERN = "model{suffix}.safetensors"
M_MMAP_THRESHOLD = -3  # of malloc.h


class Stored(NamedTuple):
    """A weight's shape, and vectors mapped from files that hold its numbers in order."""

    shape: tuple[int, ...]
    parts: list[Tensor]

    @property
    def address(self) -> int:
        """The address of its first number, which weights that are shared have in common."""
        return self.parts[0].data_ptr()


class CheckpointWeights(Mapping[str, Tensor]):
    """Tensors of a checkpoint folder in `dtype`, by the parameter's name in the library's model.

    Raise UserError for files that training did not write, and for float32 weights without names (of an earlier
    version) unless `dtype` is bfloat16, of which the model itself has copies.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        with Refusing(
            f"{folder} must hold files as train writes them, got",
            ". Use another checkpoint.",
        ):
            stored = _find_stored(folder, copies=dtype == torch.bfloat16)
        self._stored = {
            name.removeprefix(PREFIX): weight for name, weight in stored.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        weight = self._stored[name]
        return read(weight.parts, weight.shape, self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, without reading the weights."""
        return {name: weight.shape for name, weight in self._stored.items()}


def _find_stored(folder: Path, *, copies: bool) -> dict[str, Stored]:
    models = {path: index(path) for path in _by_rank(folder, MODEL)}
    optimizers = {
        path: index(path)["optimizer_state_dict"] for path in _by_rank(folder, SHARD)
    }
    if not models:
        raise ValueError(f"no file that ends in {MODEL}")
    path, model = next(iter(models.items()))
    # Stage 3 leaves empty tensors in place of the weights.
    own = {
        name: _whole(tensor)
        for name, tensor in model["module"].items()
        if tensor.numel()
    }
    if not optimizers:
        trained = _stage_0(path, model, copies=copies)
    elif "fp32_flat_groups" in next(iter(optimizers.values())):
        trained = _frozen(models) | _stage_3(model["param_shapes"], optimizers)
    else:
        trained = _stages_1_2(model["param_shapes"], optimizers)
    # A weight that two modules share is trained under one of its names.
    shared = dict(model["shared_params"] or {})
    first = {own[name].address: name for name in trained if name in own}
    shared |= {
        name: first[weight.address]
        for name, weight in own.items()
        if weight.address in first
    }
    return (
        own
        | trained
        | {alias: trained[name] for alias, name in shared.items() if name in trained}
    )


def _by_rank(folder: Path, suffix: str) -> list[Path]:
    return sorted(
        folder.glob(f"*{suffix}"),
        key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)],
    )


def _whole(tensor: Tensor) -> Stored:
    return Stored(tuple(tensor.shape), [tensor.flatten()])


def _stage_0(
    path: Path, model: Mapping[str, Any], *, copies: bool
) -> dict[str, Stored]:
    """Return the float32 copies; none if the names are missing and the model's own copies are enough."""
    groups = (model["optimizer"] or {}).get("fp32_groups", [])
    if groups and "trained" not in model:
        if copies:
            return {}
        raise UserError(
            f"{path} must name its float32 weights, got no names (written by an earlier version). "
            "Export it with dtype=bfloat16, an adapter with lora=kept."
        )
    return {
        name: _whole(tensor)
        for names, tensors in zip(model.get("trained", []), groups, strict=bool(groups))
        for name, tensor in zip(names, tensors, strict=True)
    }


def _stages_1_2(
    groups: Sequence[Mapping[str, Any]], ranks: Mapping[Path, Any]
) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    paddings = next(iter(ranks.values())).get("param_alignment_paddings")
    for number, shapes in enumerate(groups):
        vector = [
            rank["single_partition_of_fp32_groups"][number] for rank in ranks.values()
        ]
        start = 0
        for position, (name, shape) in enumerate(shapes.items()):
            count = math.prod(shape)
            stored[name] = Stored(tuple(shape), cut(vector, start, count))
            start += count + (paddings[number][position] if paddings else 0)
    return stored


def _stage_3(
    groups: Sequence[Mapping[str, Any]], ranks: Mapping[Path, Any]
) -> dict[str, Stored]:
    vectors = [rank["fp32_flat_groups"] for rank in ranks.values()]
    stored: dict[str, Stored] = {}
    start = 0
    for name, shape in (item for shapes in groups for item in shapes.items()):
        share = -(-math.prod(shape) // len(ranks))
        parts = [part for vector in vectors for part in cut(vector, start, share)]
        stored[name] = Stored(tuple(shape), cut(parts, 0, math.prod(shape)))
        start += share
    return stored


def _frozen(models: Mapping[Path, Any]) -> dict[str, Stored]:
    """Return the frozen weights of stage 3, which no optimizer holds."""
    shapes = next(iter(models.values()))["frozen_param_shapes"] or {}
    stored: dict[str, Stored] = {}
    for name, shape in shapes.items():
        parts = [
            model["frozen_param_fragments"][name].flatten() for model in models.values()
        ]
        stored[name] = Stored(tuple(shape), cut(parts, 0, math.prod(shape)))
    return stored


def write_weights(
    config: PretrainedConfig,
    weights: Mapping[str, Tensor],
    out: Path,
    *,
    dtype: torch.dtype,
    shard_size: str,
    indexed: bool = False,
) -> None:
    """Write model.safetensors, or its shards and their index, as `save_pretrained` does, a shard at a time.

    `weights` have `dtype` and the names of the library's model. With `indexed` a single file gets an index too:
    from it vLLM and SGLang know which *.safetensors are weights. Raise OSError if the disk cannot take them.
    """
    lm = skeleton(config)
    shapes = remove_tied_weights_from_state_dict(lm.state_dict(), lm)
    plan = split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=lambda tensor: tensor.numel() * dtype.itemsize,
        filename_pattern=PATTERN,
        max_shard_size=shard_size,
    )
    files: dict[str, str] = {}
    for file, names in plan.filename_to_tensors.items():
        shard = revert_weight_conversion(lm, {name: weights[name] for name in names})
        write_safetensors(shard, out / file)
        files |= dict.fromkeys(shard, file)
        del shard  # before the next one is read
    if plan.is_sharded or indexed:
        metadata = {
            "total_parameters": sum(tensor.numel() for tensor in shapes.values()),
            **plan.metadata,
        }
        write_json(
            out / SAFE_WEIGHTS_INDEX_NAME, {"metadata": metadata, "weight_map": files}
        )


def return_large_blocks() -> None:
    """Make glibc return blocks of 1 MiB and more to the system when they are freed.

    By default it keeps blocks of up to 32 MB, and weights of many sizes fragment the heap to the model's size.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
