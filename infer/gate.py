"""An adapter beside the base model's weights: merged into them, or gated.

A gated one acts on probes alone. peft reads it; its layers then give way to ones that do without
the adapter where there is no probe, so plain decoding is the base model's, in speed too.
Knows rows; knows no tree and no tokens.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME, TrainableTokensWrapper
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from conf import UserError

ADAPTER = "default"  # peft's name for the only adapter
CLOSED = sys.maxsize


class ProbeGate:
    """The first row of the current forward on which the adapter acts; none outside of `open`."""

    def __init__(self) -> None:
        self.first = CLOSED

    @classmethod
    def of(cls, lm: nn.Module) -> "ProbeGate":
        """The gate of a model's adapter; for a model without one, a gate on nothing."""
        return next((m.gate for m in lm.modules() if isinstance(m, GatedLinear)), cls())

    @contextmanager
    def open(self, first: int) -> Iterator[None]:
        """For the rows from `first` on, while the block lasts."""
        self.first = first
        try:
            yield
        finally:
            self.first = CLOSED


class GatedLinear(nn.Module):
    """Wx + s·BAx on (1, q, d) for the rows behind the gate, Wx for the others."""

    def __init__(self, layer: LoraLayer, gate: ProbeGate) -> None:
        super().__init__()
        self.base, self.gate = layer.get_base_layer(), gate
        self.a, self.b = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
        self.scaling = layer.scaling[ADAPTER]

    def forward(self, x: Tensor) -> Tensor:
        """(1, q, d) in, (1, q, d') out."""
        y = self.base(x)
        first = self.gate.first
        if first < x.shape[1]:
            y[:, first:] += self.b(self.a(x[:, first:])) * self.scaling
        return y


class GatedEmbedding(nn.Module):
    """The adapter's own rows for the ids behind the gate, the base model's for the others."""

    def __init__(self, wrapper: TrainableTokensWrapper, gate: ProbeGate) -> None:
        super().__init__()
        self.base, self.gate = wrapper.token_adapter.get_base_layer(), gate
        self.adapted = copy.deepcopy(self.base)
        self.adapted.weight = nn.Parameter(wrapper.token_adapter.get_merged_weights([ADAPTER]).detach())

    def forward(self, ids: Tensor) -> Tensor:
        """(1, q) in, (1, q, d) out."""
        first = self.gate.first
        if first >= ids.shape[1]:
            return self.base(ids)
        return torch.cat([self.base(ids[:, :first]), self.adapted(ids[:, first:])], dim=1)


def with_adapter(lm: PreTrainedModel, folder: Path, *, gated: bool) -> PreTrainedModel:
    """`lm` with the adapter of a folder as peft writes it; of weights, safetensors alone are read.

    Raises UserError for a folder that holds none, or one of another model.
    """
    weights = folder / SAFETENSORS_WEIGHTS_NAME
    if not weights.is_file() or not (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder}: wanted adapter_config.json and {weights.name}, found not both of them")
    try:
        settings = LoraConfig.from_pretrained(str(folder), inference_mode=True)
        adapted = get_peft_model(lm, settings, autocast_adapter_dtype=False)
        loaded: Any = set_peft_model_state_dict(adapted, load_file(weights))
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{folder}: wanted a LoRA adapter of this model, found {reason}") from error
    absent = [key for key in loaded.missing_keys if "lora_" in key or "trainable_tokens_delta" in key]
    if absent or loaded.unexpected_keys:
        name = [*absent, *loaded.unexpected_keys][0]
        raise UserError(f"{weights}: wanted the adapter that its configuration describes, found {name} amiss")
    return _gated(lm) if gated else adapted.merge_and_unload()


def _gated(lm: PreTrainedModel) -> PreTrainedModel:
    gate = ProbeGate()
    for name, module in list(lm.named_modules()):
        if isinstance(module, LoraLayer):
            lm.set_submodule(name, GatedLinear(module, gate))
        elif isinstance(module, TrainableTokensWrapper):
            lm.set_submodule(name, GatedEmbedding(module, gate))
    return lm
