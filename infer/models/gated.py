"""Read a gated adapter: LoRA in peft's format that is applied to probes only (engine/gate.py).

It is read without peft, because custom_generate runs with Transformers alone.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from conf.adapter import CONFIG, HEAD, WEIGHTS
from conf.errors import as_user_error
from infer.engine.attention import ProbeGate
from infer.engine.gate import GatedEmbedding, GatedLinear
from infer.engine.head import PreviousTokenHead
from infer.engine.packed import SIBLINGS

#: A warning for an export that lost the file; its argument is the path.
NO_HEAD = "%s is absent: drafts do not depend on the token drafted before them, and fewer are accepted"
PREFIX = "base_model.model."  # begins the names of modules in peft's files
#: The ends of the names of weights in peft's files.
A = ".lora_A.weight"
B = ".lora_B.weight"
TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"
#: peft's settings that are supported or do not change the adapter's values.
SUPPORTED = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "trainable_token_indices",
    "task_type",
    "peft_version",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
}
#: Supported values of other settings.
DEFAULTS: dict[str, list[Any]] = {"bias": ["none"], "init_lora_weights": [True, False]}


def gate_model(lm: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Add the adapter of a folder, and its previous-token head if any, to `lm`; return `lm`."""
    for name, layer in gated_layers(lm, folder).items():
        lm.set_submodule(name, layer)
    if (folder / HEAD).is_file():
        lm.previous_token_head = read_head(lm, folder / HEAD)
    return lm


def read_head(lm: PreTrainedModel, path: Path) -> PreviousTokenHead:
    """Read a previous-token head. Raises UserError for a file that is not a head of `lm`."""
    output: Any = lm.get_output_embeddings()
    d = output.in_features
    with as_user_error(
        f"{path} must be a head of this model, got", ". Export it again."
    ):
        weights = load_file(path)
        w1, w2 = (
            weights[name].to(lm.device, lm.dtype) for name in ("w1.weight", "w2.weight")
        )
        check_shape(w1, d, 2 * d)
        check_shape(w2, d, d)
        check_finite("w1.weight", w1)
        check_finite("w2.weight", w2)
    return PreviousTokenHead(lm, w1, w2)


def gated_layers(lm: PreTrainedModel, folder: Path) -> dict[str, nn.Module]:
    """Return the gated modules that replace modules of `lm`, by name. They share one gate.

    Raises UserError for a folder without an adapter, and for an adapter that is not LoRA of
    linear layers of this model.
    """
    problem = f"{folder}: a gated adapter must be LoRA of linear layers, got"
    with as_user_error(problem, ". Export the model again."):
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS)
        check_adapter_config(settings)
        layers = _linear_layers(lm, settings, weights)
        gate = next((layer.gate for layer in layers.values()), ProbeGate())
        token_ids = settings.get("trainable_token_indices")
        replaced: dict[str, nn.Module] = dict(layers)
        if lm.device.type == "cpu":
            replaced |= _zero_adapters(lm, layers, gate)
        if token_ids:
            embedding: Any = lm.get_input_embeddings()
            modules = lm.named_modules()
            name = next(name for name, module in modules if module is embedding)
            rows = weights.pop(f"{PREFIX}{name}{TOKEN_ROWS}").to(lm.device, lm.dtype)
            check_shape(rows, len(token_ids), embedding.embedding_dim)
            check_finite(f"{name}{TOKEN_ROWS}", rows)
            if not set(token_ids) <= set(range(embedding.num_embeddings)):
                raise ValueError(f"trainable_token_indices={token_ids!r:.60}")
            ids = torch.tensor(token_ids, device=lm.device)
            replaced[name] = GatedEmbedding(embedding, ids, rows, gate)
        if weights:
            raise ValueError(f"weights without a layer: {min(weights)}")
    return replaced


def check_adapter_config(settings: dict[str, Any]) -> None:
    """Raise ValueError for an unsupported setting that changes the adapter's values."""
    if settings["peft_type"] != "LORA":
        raise ValueError(f"peft_type={settings['peft_type']}")
    for name, value in settings.items():
        if name not in SUPPORTED and value and value not in DEFAULTS.get(name, []):
            raise ValueError(f"{name}={value!r:.60}")


def check_shape(weight: Tensor, *expected: int) -> None:
    """Raise ValueError for a weight of another shape."""
    if weight.shape != expected:
        raise ValueError(f"weights of {tuple(weight.shape)} instead of {expected}")


def check_finite(name: str, weight: Tensor) -> None:
    """Raise ValueError for NaN and infinity, which attention would spread to the text."""
    if not weight.isfinite().all():
        raise ValueError(f"values of {name} that are not finite in {weight.dtype}")


def _linear_layers(
    lm: PreTrainedModel, settings: dict[str, Any], weights: dict[str, Tensor]
) -> dict[str, GatedLinear]:
    """Return the gated linear layers by name; remove their weights from `weights`."""
    rank = settings["r"]
    scaling = settings["lora_alpha"] / rank
    if settings.get("use_rslora"):
        scaling = settings["lora_alpha"] / math.sqrt(rank)
    ends = tuple(f".{target}" for target in settings["target_modules"])
    gate = ProbeGate()
    layers: dict[str, GatedLinear] = {}
    for name, base in lm.named_modules():
        if not f".{name}".endswith(ends):
            continue
        if not isinstance(base, nn.Linear):
            raise ValueError(f"LoRA of {name}, which is not a linear layer")
        if base is lm.get_output_embeddings():
            raise ValueError(f"LoRA of {name}, the output head")
        a = weights.pop(f"{PREFIX}{name}{A}").to(lm.device, lm.dtype)
        b = weights.pop(f"{PREFIX}{name}{B}").to(lm.device, lm.dtype)
        check_shape(a, rank, base.in_features)
        check_shape(b, base.out_features, rank)
        check_finite(f"{name}{A}", a)
        check_finite(
            f"{name}{B} times lora_alpha={settings['lora_alpha']}", b * scaling
        )
        layers[name] = _gated_linear(base, a, b, scaling, gate)
    return layers


def _zero_adapters(
    lm: PreTrainedModel, layers: Mapping[str, GatedLinear], gate: ProbeGate
) -> dict[str, GatedLinear]:
    """Return the layers without an adapter beside `layers`, by name, with an adapter of zeros.

    Layers that read the same input are one product of the fused decoder, if each of them has an
    adapter.
    """
    zero: dict[str, GatedLinear] = {}
    for name in layers:
        parent, _, own = name.rpartition(".")
        group = SIBLINGS.get(own)
        for other in (part for part in SIBLINGS if SIBLINGS[part] == group):
            sibling = f"{parent}.{other}"
            base = getattr(lm.get_submodule(parent), other, None)
            if sibling not in layers and isinstance(base, nn.Linear):
                a = base.weight.new_zeros(1, base.in_features)
                b = base.weight.new_zeros(base.out_features, 1)
                zero[sibling] = _gated_linear(base, a, b, 1.0, gate)
    return zero


def _gated_linear(
    base: nn.Linear, a: Tensor, b: Tensor, scaling: float, gate: ProbeGate
) -> GatedLinear:
    """Return the layer with its adapter, divided over ranks as the base layer is."""
    weight = base.weight
    if not isinstance(weight, DTensor):
        return GatedLinear(base, a, b, scaling, gate)
    mesh = weight.device_mesh
    (placement,) = weight.placements
    group = None
    if placement == Shard(0):
        b = distribute_tensor(b, mesh, [placement], src_data_rank=None).to_local()
    elif placement == Shard(1):
        a = distribute_tensor(a, mesh, [placement], src_data_rank=None).to_local()
        group = mesh.get_group()
    return GatedLinear(base, a, b, scaling, gate, group=group)
