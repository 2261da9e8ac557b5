"""A finished training folder -> a model directory that others can serve."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conf import UserError
from conf.schema import PATH
from conf.tracker import TrackerConfig
from train.config import LoraSettings, ShardsConfig

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass
class ExportConfig:
    """python -m train.export: a checkpoint -> a model directory that others can serve."""

    checkpoint: str = field(metadata=PATH)  # a finished folder of training
    out: str = field(metadata=PATH)  # the model directory to write
    data: ShardsConfig = field(
        default_factory=ShardsConfig
    )  # where the shards are now, if they have moved
    dtype: str = "bfloat16"  # or float16, float32; bf16, fp16 and fp32 for short
    lora: str | None = (
        None  # merged or kept; by default merged, or kept where the adapter is gated
    )
    # a Jinja file for chats; by default the base tokenizer's, else one that completes the messages as one text
    chat_template: str | None = field(default=None, metadata=PATH)
    shard_size: str = (
        "5GB"  # largest file of weights: digits and KB, MB, GB or TB, powers of 1000
    )
    verify: bool = True  # read the result back: weights, logits and held-out acceptance must be the training's
    verify_sequences: int | None = (
        None  # to measure acceptance on; by default what a few minutes allow
    )
    # the folder of infer.bench's report of the finished `out`: its figures go into the model card
    report: str | None = field(default=None, metadata=PATH)
    push: str | None = None  # upload the finished `out` to the hub as ORG/NAME
    artifact: bool = False  # log the finished `out` to Weights & Biases
    private: bool = True  # make the hub's repository private
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        self.dtype = DTYPES.get(self.dtype, self.dtype)
        if self.lora not in (None, "merged", "kept"):
            raise ValueError(f"lora must be merged or kept, got {self.lora}")
        if self.dtype not in DTYPES.values():
            raise ValueError(
                f"dtype must be bfloat16, float16 or float32, got {self.dtype}"
            )
        if not re.fullmatch(r"[1-9]\d*[KMGT]B", self.shard_size, re.IGNORECASE):
            raise ValueError(
                f"shard_size must be digits and KB, MB, GB or TB, got {self.shard_size}"
            )
        if self.artifact and self.tracker.mode == "disabled":
            raise ValueError(
                "artifact must be false with tracker.mode=disabled, got true. Use offline or online."
            )
        if self.verify_sequences is not None and self.verify_sequences < 2:
            raise ValueError(
                f"verify_sequences must be at least 2, got {self.verify_sequences}"
            )
        if self.push is not None and not re.fullmatch(
            r"[\w.-]+/[\w.-]+", self.push, re.ASCII
        ):
            raise ValueError(
                f"push must be a name on the hub as ORG/NAME, got {self.push}"
            )


def trained_lora(manifest: Mapping[str, Any]) -> LoraSettings:
    """Return the LoRA settings of a training; rank 0 without LoRA."""
    return LoraSettings(**manifest["settings"].get("lora", {}))


def keeps_adapter(config: ExportConfig, lora: LoraSettings) -> bool:
    """Return whether the adapter stays beside the base model. Raise UserError for an impossible setting."""
    if config.lora == "kept" and not lora.rank:
        raise UserError(
            f"lora=kept must have an adapter, got {config.checkpoint} without LoRA. Omit lora=."
        )
    if config.lora == "merged" and lora.gated:
        raise UserError(
            f"lora must be kept with a gated adapter, got merged, {config.checkpoint}. Omit lora=."
        )
    return lora.gated or config.lora == "kept"
