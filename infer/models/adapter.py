"""An adapter beside the base model's weights that acts on every token: merged into them, by peft."""

from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from transformers import PreTrainedModel

from conf import UserError
from conf.errors import in_one_line


def merge_adapter(lm: PreTrainedModel, folder: Path, *, described: bool) -> PreTrainedModel:
    """Return `lm` with the adapter of a folder as peft writes it; of weights, safetensors alone are read.
    `described`: there is an adaptive.json, which says that it is not gated.

    Raises UserError for a folder that holds none, or one of another model, and where it is not known whether
    the adapter of adaptive tokens is gated: ungated it would change every token.
    """
    weights = folder / SAFETENSORS_WEIGHTS_NAME
    if not weights.is_file() or not (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} must have adapter_config.json and {weights.name}, got not both of them")
    try:
        settings = LoraConfig.from_pretrained(str(folder), inference_mode=True)
        adapted = get_peft_model(lm, settings, autocast_adapter_dtype=False)
        loaded: Any = set_peft_model_state_dict(adapted, load_file(weights))
        merged = adapted.merge_and_unload()
    except Exception as error:  # whatever the libraries meet first in files that are none of their own
        raise UserError(f"{folder} must be a LoRA adapter of this model, got {in_one_line(error)}") from error
    if not described and settings.trainable_token_indices:
        raise UserError(
            f"{folder.parent} must have adaptive.json, since the adapter trained adaptive tokens, got none"
        )
    absent = [key for key in loaded.missing_keys if "lora_" in key or "trainable_tokens_delta" in key]
    if absent or loaded.unexpected_keys:
        name = [*absent, *loaded.unexpected_keys][0]
        raise UserError(f"{weights} must be the adapter that its configuration describes, got {name} amiss")
    return merged
