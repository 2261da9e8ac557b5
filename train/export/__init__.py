"""A finished training folder -> a model directory that others can serve."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import UserError
from conf.settings.schema import check_settings, setting
from train.config import LoraSettings


@dataclass
class ExportConfig:
    """python -m train.export: a checkpoint -> a model directory that others can serve."""

    #: a finished folder of training
    checkpoint: str = setting(path=True)
    #: the model directory to write
    out: str = setting(path=True)
    #: type of the weights: bfloat16, float16 or float32
    dtype: str = setting("bfloat16", choices=("bfloat16", "float16", "float32"))
    #: merged or kept; by default merged, or kept where the adapter is gated
    lora: str | None = setting(None, choices=("merged", "kept"))
    #: largest file of weights: digits and KB, MB, GB or TB, powers of 1000
    shard_size: str = "5GB"
    #: read the result back: weights and logits must be the training's
    verify: bool = True
    #: folder of infer.bench's report of the finished `out`: its figures go into the model card
    report: str | None = setting(None, path=True)

    def __post_init__(self) -> None:
        check_settings(self)
        if not re.fullmatch(r"[1-9]\d*[KMGT]B", self.shard_size):
            raise ValueError(f"shard_size must be like 5GB, got {self.shard_size}")


def trained_lora(manifest: Mapping[str, Any]) -> LoraSettings:
    """Return the LoRA settings of a training; rank 0 without LoRA."""
    return LoraSettings(**manifest["settings"]["lora"])


def keeps_adapter(config: ExportConfig, lora: LoraSettings) -> bool:
    """Return True if the adapter stays beside the base model.

    Raise UserError for a value of `lora` that this training does not allow.
    """
    kind = "a gated adapter" if lora.gated else f"rank {lora.rank}"
    impossible = "merged" if lora.gated else "kept"
    if config.lora == impossible and (lora.gated or not lora.rank):
        raise UserError(
            f"lora={config.lora} must suit the adapter of {config.checkpoint}, got {kind}. "
            "Omit lora=."
        )
    return lora.gated or config.lora == "kept"
