"""A gated adapter beside the base model's weights: LoRA as peft writes it, put behind a gate (gate.py).

It is read without peft, since custom_generate reads it where Transformers alone is installed.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from conf.errors import UserError, in_one_line
from infer.engine.attention import ProbeGate
from infer.engine.gate import GatedEmbedding, GatedLinear

FOLDER = "adapter"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the library's names, in peft's files
A = ".lora_A.weight"
B = ".lora_B.weight"
ROWS = ".token_adapter.trainable_tokens_delta"
# Settings that say nothing of an adapter's values. Those that `_amiss` does not check must be unset.
IDLE = {
    *(
        "task_type",
        "peft_version",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ),
    *("lora_dropout", "megatron_core", "qalora_group_size", "runtime_config"),
}
MUST_BE = "a gated adapter must be LoRA of linear layers"
AGAIN = "Export the model again."


def gate_model(lm: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return `lm` with the adapter of a folder, in place. Raises UserError for what is none of this model's."""
    for name, layer in gated_layers(lm, folder).items():
        lm.set_submodule(name, layer)
    return lm


def gated_layers(lm: PreTrainedModel, folder: Path) -> dict[str, nn.Module]:
    """Return what takes the place of modules of `lm`, by their names; all have one gate. Raises UserError for a
    folder without an adapter, and for one that is not LoRA of linear layers of this model.
    """
    settings, weights = _read(folder)
    gate = ProbeGate()
    layers: dict[str, nn.Module] = {}
    scaling = settings["lora_alpha"] / (
        math.sqrt(settings["r"]) if settings["use_rslora"] else settings["r"]
    )
    try:
        for name, base in _targets(lm, settings["target_modules"]):
            a, b = (
                weights.pop(f"{PREFIX}{name}{part}").to(lm.device, lm.dtype)
                for part in (A, B)
            )
            if (a.shape[1], b.shape[0], a.shape[0]) != (
                base.in_features,
                base.out_features,
                b.shape[1],
            ):
                raise ValueError(f"weights of another model's sizes for {name}")
            layers[name] = _linear(base, a, b, scaling, gate)
        if ids := settings["trainable_token_indices"]:
            embedding: Any = lm.get_input_embeddings()
            name = next(
                name for name, module in lm.named_modules() if module is embedding
            )
            rows = weights.pop(f"{PREFIX}{name}{ROWS}").to(lm.device, lm.dtype)
            if (
                rows.shape != (len(ids), embedding.embedding_dim)
                or max(ids) >= embedding.num_embeddings
            ):
                raise ValueError(f"weights of another model's sizes for {name}")
            layers[name] = GatedEmbedding(
                embedding, torch.tensor(ids, device=lm.device), rows, gate
            )
        if weights:
            raise ValueError(min(weights))
    except KeyError as error:
        raise UserError(
            f"{folder}: {WEIGHTS} must have {error}, got no such weight. {AGAIN}"
        ) from error
    except ValueError as error:
        raise UserError(f"{folder}: {MUST_BE}, got {error}. {AGAIN}") from error
    return layers


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not (folder / WEIGHTS).is_file() or not (folder / CONFIG).is_file():
        raise UserError(
            f"{folder}: an adapter must have {CONFIG} and {WEIGHTS}, got not both of them. {AGAIN}"
        )
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS)
    except (
        Exception
    ) as error:  # whatever a parser meets in a file that is none of its own
        strange = in_one_line(error)
        raise UserError(
            f"{folder}: an adapter must be JSON and safetensors, got {strange}. {AGAIN}"
        ) from error
    if not isinstance(settings, dict):
        raise UserError(
            f"{folder}: {CONFIG} must be a JSON object, got {settings!r:.60}. {AGAIN}"
        )
    defaults = {"use_rslora": False, "trainable_token_indices": None}
    if amiss := _amiss(settings := defaults | settings):
        raise UserError(f"{folder}: {MUST_BE}, got {amiss}. {AGAIN}")
    return settings, weights


def _amiss(settings: dict[str, Any]) -> str | None:
    ids = settings["trainable_token_indices"]
    valid = {
        "peft_type": settings.get("peft_type") == "LORA",
        "r": type(settings.get("r")) is int and settings["r"] > 0,
        "lora_alpha": type(settings.get("lora_alpha")) in (int, float),
        "use_rslora": type(settings["use_rslora"]) is bool,
        "target_modules": _is_list(settings.get("target_modules"), str),
        "trainable_token_indices": ids is None
        or _is_list(ids, int)
        and min([0, *ids]) >= 0,
        "bias": settings.get("bias", "none") == "none",
        "init_lora_weights": type(settings.get("init_lora_weights", True)) is bool,
    }
    valid |= {
        name: not value
        for name, value in settings.items()
        if name not in valid.keys() | IDLE
    }
    amiss = (name for name, is_valid in valid.items() if not is_valid)
    return next((f"{name}={settings.get(name)!r:.60}" for name in amiss), None)


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _targets(lm: PreTrainedModel, targets: list[str]) -> list[tuple[str, nn.Linear]]:
    ends = tuple(f".{target}" for target in targets)
    modules = [
        (name, module)
        for name, module in lm.named_modules()
        if f".{name}".endswith(ends)
    ]
    if others := [
        name for name, module in modules if not isinstance(module, nn.Linear)
    ]:
        raise ValueError(f"LoRA of {others[0]}, which is no linear layer")
    return modules


def _linear(
    base: nn.Linear, a: Tensor, b: Tensor, scaling: float, gate: ProbeGate
) -> GatedLinear:
    weight = base.weight
    group = None
    if not isinstance(weight, DTensor):
        return GatedLinear(base, a, b, scaling, gate)
    mesh = weight.device_mesh
    (placement,) = weight.placements
    if placement == Shard(0):
        b = distribute_tensor(b, mesh, [placement], src_data_rank=None).to_local()
    elif placement == Shard(1):
        a = distribute_tensor(a, mesh, [placement], src_data_rank=None).to_local()
        group = mesh.get_group()
    return GatedLinear(base, a, b, scaling, gate, divided=True, group=group)
