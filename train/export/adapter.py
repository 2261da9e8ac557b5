"""What becomes of a LoRA adapter: merged into the weights, or kept beside them. Decides; touches no weights."""

from typing import Any

from conf import UserError
from train.config import LoraSettings
from train.export.config import ExportConfig


def trained_lora(manifest: dict[str, Any]) -> LoraSettings:
    """How the checkpoint was trained."""
    return LoraSettings(**manifest["settings"].get("lora", {}))


def keeps_adapter(config: ExportConfig, lora: LoraSettings) -> bool:
    """Whether the adapter stays beside the base model. Raises UserError for what cannot be."""
    if config.lora == "kept" and not lora.rank:
        raise UserError(
            f"lora=kept: wanted a checkpoint trained with LoRA, found {config.checkpoint} with lora.rank=0"
        )
    if config.lora == "merged" and lora.gated:
        raise UserError(
            "lora=merged: wanted an adapter that acts on every row, found a gated one in "
            f"{config.checkpoint}, which can only be kept"
        )
    return lora.gated or config.lora == "kept"
