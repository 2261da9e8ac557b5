"""Settings of the export: a finished training folder -> a model directory to serve."""

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
    """python -m train.export: a checkpoint -> a model directory to serve."""

    #: a finished training folder
    checkpoint: str = setting(path=True)
    #: output folder: the model directory
    out: str = setting(path=True)
    #: dtype of the written weights: bfloat16, float16 or float32
    dtype: str = setting("bfloat16", choices=("bfloat16", "float16", "float32"))
    #: form of a LoRA adapter: merged into the weights, kept in adapter/, or uno
    #: (write only the adapter, in the format of SGLang and vLLM); default: merged, or kept
    #: if the adapter is gated
    lora: str | None = setting(None, choices=("merged", "kept", UNO))
    #: maximum size of a weights file: a number and KB, MB, GB or TB (powers of 1000)
    shard_size: str = "5GB"
    #: read the result back and compare its weights and logits with the checkpoint's
    verify: bool = True
    #: report folder of infer.bench for the finished `out`; adds its figures to the model card
    report: str | None = setting(None, path=True)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        check_settings(self)
        if not re.fullmatch(r"[1-9]\d*[KMGT]B", self.shard_size):
            raise ValueError(
                f"shard_size must be a size such as 5GB or 500MB, got {self.shard_size}"
            )


def trained_lora(manifest: Mapping[str, Any]) -> LoraSettings:
    """Return the LoRA settings of a training; rank 0 without LoRA."""
    return LoraSettings(**manifest["settings"]["lora"])


def trained_mask(manifest: Mapping[str, Any]) -> str | int | None:
    """Return a training's mask, as ObjectiveConfig.described_mask; None if it has no mask."""
    default = ADAPTIVE if manifest["adaptive"] else None
    mask: str | int | None = manifest.get("mask", default)
    return mask


def has_uno_format(manifest: Mapping[str, Any]) -> bool:
    """Return True if the adapter is gated and has no embedding rows of its own."""
    masked = trained_mask(manifest) not in (None, ADAPTIVE)
    return masked and trained_lora(manifest).gated


def keeps_adapter(config: ExportConfig, lora: LoraSettings) -> bool:
    """Return True unless the adapter is merged into the weights.

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
    """Raise UserError for lora=uno if servers cannot use this training's adapter."""
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
