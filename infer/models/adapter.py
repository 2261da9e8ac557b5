"""An adapter beside the base model's weights, as peft reads it: merged into them, or gated (gate.py)."""

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import Linear, LoraLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME, TrainableTokensWrapper
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from conf import UserError
from conf.errors import in_one_line
from infer.engine.gate import GatedEmbedding, GatedLinear, ProbeGate

ADAPTER = "default"  # peft's name for the only adapter
# Settings that say where a plain adapter acts, how strongly, and how it was trained; GatedLinear has no others.
GATED = {
    *("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
    *("trainable_token_indices", "init_lora_weights"),
}


def with_adapter(lm: PreTrainedModel, folder: Path, *, gated: bool | None) -> PreTrainedModel:
    """`lm` with the adapter of a folder as peft writes it; of weights, safetensors alone are read. `gated` is
    what adaptive.json says, None where there is none.

    Raises UserError for a folder that holds none, or one of another model, and where it is not known whether
    the adapter of adaptive tokens is gated: ungated it would change every token.
    """
    weights = folder / SAFETENSORS_WEIGHTS_NAME
    if not weights.is_file() or not (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder}: wanted adapter_config.json and {weights.name}, found not both of them")
    try:
        settings = LoraConfig.from_pretrained(str(folder), inference_mode=True)
        adapted = get_peft_model(lm, settings, autocast_adapter_dtype=False)
        loaded: Any = set_peft_model_state_dict(adapted, load_file(weights))
        served = lm if gated else adapted.merge_and_unload()
    except Exception as error:  # whatever the libraries meet first in files that are none of their own
        raise UserError(f"{folder}: wanted a LoRA adapter of this model, found {in_one_line(error)}") from error
    if gated is None and settings.trainable_token_indices:
        raise UserError(
            f"{folder.parent}: wanted adaptive.json, since the adapter trained adaptive tokens, found none"
        )
    absent = [key for key in loaded.missing_keys if "lora_" in key or "trainable_tokens_delta" in key]
    if absent or loaded.unexpected_keys:
        name = [*absent, *loaded.unexpected_keys][0]
        raise UserError(f"{weights}: wanted the adapter that its configuration describes, found {name} amiss")
    if gated:
        _check_gated(settings, lm, folder)
        gated_layers(lm)
    return served


def _check_gated(settings: LoraConfig, lm: PreTrainedModel, folder: Path) -> None:
    """Raises UserError for an adapter that changes more than a gate can close: weights of the base model, or
    another sum than that of GatedLinear.
    """
    plain = LoraConfig()
    others = [
        f"{field.name}={getattr(settings, field.name)}"
        for field in fields(settings)
        if field.name not in GATED and getattr(settings, field.name) != getattr(plain, field.name)
    ]
    if not isinstance(settings.init_lora_weights, bool):  # the others change the base model's weights
        others.append(f"init_lora_weights={settings.init_lora_weights}")
    others += [
        f"LoRA of {name}"
        for name, module in lm.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, Linear)
    ]
    if others:
        raise UserError(
            f"{folder}: a gated adapter must be LoRA of linear layers, got {others[0]}. Merge the adapter, and "
            "remove the folder."
        )


def gated_layers(lm: PreTrainedModel) -> PreTrainedModel:
    """Peft's layers give way to ones that do without the adapter where there is no probe."""
    gate = ProbeGate()
    for name, module in list(lm.named_modules()):
        if isinstance(module, LoraLayer):
            lm.set_submodule(name, _linear(module, gate))
        elif isinstance(module, TrainableTokensWrapper):
            lm.set_submodule(name, _embedding(module, gate))
    return lm


def _linear(layer: LoraLayer, gate: ProbeGate) -> GatedLinear:
    a, b, scaling = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER], layer.scaling[ADAPTER]
    return GatedLinear(layer.get_base_layer(), a, b, scaling, gate)


def _embedding(wrapper: TrainableTokensWrapper, gate: ProbeGate) -> GatedEmbedding:
    base = wrapper.token_adapter.get_base_layer()
    adapted = copy.deepcopy(base)
    adapted.weight = nn.Parameter(wrapper.token_adapter.get_merged_weights([ADAPTER]).detach())
    return GatedEmbedding(base, adapted, gate)
