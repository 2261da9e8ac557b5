"""A finished training folder -> a model directory that others can serve."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conf.errors import UserError
from conf.runs.tracker import TrackerConfig
from conf.settings.schema import check_settings, setting
from train.config import ADAPTIVE, LoraSettings

UNO = "uno"  # lora=uno, and the folder of the same files in a model directory


@dataclass
class ExportConfig:
    """python -m train.export: a checkpoint -> a model directory that others can serve."""

    #: a finished folder of training
    checkpoint: str = setting(path=True)
    #: the model directory to write
    out: str = setting(path=True)
    #: type of the weights: bfloat16, float16 or float32
    dtype: str = setting("bfloat16", choices=("bfloat16", "float16", "float32"))
    #: merged, kept, or uno (a folder with the adapter alone, as SGLang and vLLM read it);
    #: by default merged, or kept where the adapter is gated
    lora: str | None = setting(None, choices=("merged", "kept", UNO))
    #: largest file of weights: digits and KB, MB, GB or TB, powers of 1000
    shard_size: str = "5GB"
    #: read the result back: weights and logits must be the training's
    verify: bool = True
    #: folder of infer.bench's report of the finished `out`: its figures go into the model card
    report: str | None = setting(None, path=True)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        check_settings(self)
        if not re.fullmatch(r"[1-9]\d*[KMGT]B", self.shard_size):
            raise ValueError(f"shard_size must be like 5GB, got {self.shard_size}")


def trained_lora(manifest: Mapping[str, Any]) -> LoraSettings:
    """Return the LoRA settings of a training; rank 0 without LoRA."""
    return LoraSettings(**manifest["settings"]["lora"])


def trained_mask(manifest: Mapping[str, Any]) -> str | int | None:
    """Return a training's mask as ObjectiveConfig.described_mask does; None without one."""
    default = ADAPTIVE if manifest["adaptive"] else None
    mask: str | int | None = manifest.get("mask", default)
    return mask


def has_uno_format(manifest: Mapping[str, Any]) -> bool:
    """Return True if an adapter has no rows of its own and acts on draft rows alone."""
    masked = trained_mask(manifest) not in (None, ADAPTIVE)
    return masked and trained_lora(manifest).gated


def keeps_adapter(config: ExportConfig, lora: LoraSettings) -> bool:
    """Return True if the adapter stays beside the base model, or is written alone.

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


def check_uno(config: ExportConfig, manifest: Mapping[str, Any]) -> None:
    """Raise UserError for lora=uno of a training whose adapter no server could use."""
    if config.lora == UNO and not has_uno_format(manifest):
        mask = manifest["settings"]["objective"].get("mask") or ADAPTIVE
        raise UserError(
            f"lora=uno needs a training with lora.gated=true and objective.mask=noise or "
            f"an id, got lora.gated={str(trained_lora(manifest).gated).lower()} and "
            f"objective.mask={mask} in {config.checkpoint}. Omit lora=."
        )
    if config.lora == UNO and config.report:
        raise UserError(
            f"report={config.report} needs a model directory, got lora=uno. Omit report=."
        )
