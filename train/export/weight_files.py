"""Weights written as Transformers does, a shard in memory at a time. Knows no checkpoint."""

from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from conf.files import write_json
from train.checkpoint import write_safetensors
from train.pretrained import skeleton

PATTERN = "model{suffix}.safetensors"


def write_weights(
    config: PretrainedConfig,
    weights: Mapping[str, Tensor],
    out: Path,
    *,
    dtype: torch.dtype,
    shard_size: str,
    indexed: bool = False,
) -> None:
    """Write model.safetensors, or its shards and model.safetensors.index.json, as `save_pretrained` does: tied
    weights once, an architecture's weights under the names that its publisher gave them.

    `indexed` writes the index of a single file too: by it vLLM and SGLang know which *.safetensors are weights.
    `weights` have `dtype` and the names of the library's model. Each is asked for once, and a shard's are held.
    Raises OSError where the disk cannot take them.
    """
    lm = skeleton(config)
    shapes = remove_tied_weights_from_state_dict(lm.state_dict(), lm)
    plan = split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=lambda tensor: tensor.numel() * dtype.itemsize,
        filename_pattern=PATTERN,
        max_shard_size=shard_size,
    )
    places: dict[str, str] = {}
    for file, names in plan.filename_to_tensors.items():
        shard = revert_weight_conversion(lm, {name: weights[name] for name in names})
        write_safetensors(shard, out / file)
        places |= dict.fromkeys(shard, file)
        del shard  # before the next one's are read
    if plan.is_sharded or indexed:
        parameters = sum(tensor.numel() for tensor in shapes.values())
        metadata = {"total_parameters": parameters, **plan.metadata}
        write_json(out / SAFE_WEIGHTS_INDEX_NAME, {"metadata": metadata, "weight_map": places})
