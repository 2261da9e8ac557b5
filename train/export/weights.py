"""Read a checkpoint's weights one tensor at a time, and write a model file by file.

DeepSpeed's zero_to_fp32 loads the whole model into memory (with ZeRO 2 twice, in float32)
and does not support stage 0. Here trained weights are read from the optimizer's float32
copies, and frozen weights from the files that a run writes once (train/checkpoint.py), or
from the model's file in older runs:

    stage 0      by name from the model's file; for a bfloat16 model the optimizer's float32
                 copies, by group
    stages 1, 2  a group of weights is one flat vector, divided among the ranks:

                     group 0   |a a a b b|b c c · ·|       · is padding
                                 rank 0    rank 1

    stage 3      every weight is divided among the ranks:

                     rank 0    |a a·|b b|c|                groups follow one another
                     rank 1    |a ·|b ·|c|                 · is padding
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from conf.architecture import skeleton
from conf.errors import as_user_error
from conf.runs.files import write_json
from train.checkpoint import SHARD
from train.tensor_files import LazyWeights, load_mapped, write_safetensors

# Suffix of the files with the model's weights, or a rank's share of them.
MODEL = "model_states.pt"
PREFIX = "lm."  # prefix of the Transformers model in train.model.AdaptiveLM
PATTERN = "model{suffix}.safetensors"


class Stored(NamedTuple):
    """A weight's shape, and the vectors that together contain its values in order."""

    shape: tuple[int, ...]
    parts: list[Tensor]


class CheckpointWeights(LazyWeights):
    """The tensors of a checkpoint folder in `dtype`, named as in the Transformers model.

    `frozen` is the folder with the run's frozen weights; None if the checkpoint has all weights.
    Raise UserError for files that are not in the format of training.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        frozen: Path | None = None,
    ) -> None:
        self._dtype = dtype
        with as_user_error(
            f"{folder} must hold files as train writes them, got",
            ". Use another checkpoint.",
        ):
            stored = _find_stored(folder, frozen)
        self._names: dict[str, Stored] = {
            name.removeprefix(PREFIX): weight for name, weight in stored.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        weight = self._names[name]
        return join(weight.parts, weight.shape, self._dtype)


def _find_stored(folder: Path, frozen: Path | None) -> dict[str, Stored]:
    models = _by_rank(folder, MODEL)
    optimizers = [rank["optimizer_state_dict"] for rank in _by_rank(folder, SHARD)]
    if not models:
        raise ValueError(f"no file that ends in {MODEL}")
    model = models[0]
    # With stage 3 the model's file has empty tensors instead of the weights.
    stored = {
        name: _whole(tensor)
        for name, tensor in model["module"].items()
        if tensor.numel()
    }
    for path in sorted(frozen.glob("*.pt")) if frozen else ():
        stored |= {name: _whole(tensor) for name, tensor in load_mapped(path).items()}
    if not optimizers:
        trained = _stage_0(model)
    elif "fp32_flat_groups" in optimizers[0]:
        trained = _frozen(models) | _stage_3(model["param_shapes"], optimizers)
    else:
        trained = _stages_1_2(model["param_shapes"], optimizers)
    # The optimizer has a shared weight under only one of its names.
    aliases = dict(model["shared_params"] or {})
    addresses = {name: weight.parts[0].data_ptr() for name, weight in stored.items()}
    names = {addresses[name]: name for name in trained if name in stored}
    for name, address in addresses.items():
        if address in names:
            aliases[name] = names[address]
    stored |= trained
    for alias, name in aliases.items():
        if name in trained:
            stored[alias] = trained[name]
    return stored


def _by_rank(folder: Path, suffix: str) -> list[Any]:
    paths = sorted(
        folder.glob(f"*{suffix}"),
        key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)],
    )
    return [load_mapped(path) for path in paths]


def _whole(tensor: Tensor) -> Stored:
    return Stored(tuple(tensor.shape), [tensor.flatten()])


def _stage_0(model: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the float32 copies of a 16-bit model's weights; {} for a float32 model."""
    groups = (model["optimizer"] or {}).get("fp32_groups", [])
    return {
        name: _whole(tensor)
        for names, tensors in zip(model["trained"], groups, strict=bool(groups))
        for name, tensor in zip(names, tensors, strict=True)
    }


def _stages_1_2(
    groups: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]
) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    paddings = ranks[0].get("param_alignment_paddings")
    for number, shapes in enumerate(groups):
        vector = [rank["single_partition_of_fp32_groups"][number] for rank in ranks]
        start = 0
        for position, (name, shape) in enumerate(shapes.items()):
            count = math.prod(shape)
            stored[name] = Stored(tuple(shape), slice_vector(vector, start, count))
            start += count + (paddings[number][position] if paddings else 0)
    return stored


def _stage_3(
    groups: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]
) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    start = 0
    for name, shape in (item for shapes in groups for item in shapes.items()):
        share = -(-math.prod(shape) // len(ranks))
        parts = []
        for rank in ranks:
            parts += slice_vector(rank["fp32_flat_groups"], start, share)
        stored[name] = Stored(tuple(shape), slice_vector(parts, 0, math.prod(shape)))
        start += share
    return stored


def _frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, Stored]:
    """Return the frozen weights of stage 3, which the optimizer does not have."""
    stored: dict[str, Stored] = {}
    for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
        parts = [model["frozen_param_fragments"][name].flatten() for model in models]
        stored[name] = Stored(tuple(shape), slice_vector(parts, 0, math.prod(shape)))
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
    """Write the weights as `save_pretrained` does, with one file at a time in memory.

    `weights` have `dtype` and the names of the Transformers model. With `indexed` a single
    file gets an index too: vLLM and SGLang read there which *.safetensors files are
    weights. Raise OSError if a file cannot be written.
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


def slice_vector(parts: Sequence[Tensor], start: int, count: int) -> list[Tensor]:
    """Return views of the elements `start` to `start + count` of concatenated vectors.

    `parts` are the (n,) vectors in order. Raises ValueError if they have fewer elements.
    """
    views = []
    begin = 0
    for part in parts:
        view = part[max(start - begin, 0) : max(start + count - begin, 0)]
        if len(view):
            views.append(view)
        begin += len(part)
    if start + count > begin:
        raise ValueError(
            f"the vectors must have at least {start + count} elements, got {begin}"
        )
    return views


def join(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Copy concatenated vectors into one tensor of the given shape and dtype."""
    whole = torch.empty(math.prod(shape), dtype=dtype)
    begin = 0
    for part in parts:
        whole[begin : begin + len(part)] = part.detach()
        begin += len(part)
    return whole.view(*shape)
