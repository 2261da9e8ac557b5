"""Random gated adapters, written by peft."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel


def write_adapter(lm: PreTrainedModel, folder: Path, *, seed: int = 1, **settings: Any) -> Path:
    """Write an adapter of `lm`, which is changed: rank 2 on all linear layers unless `settings` differ."""
    torch.manual_seed(seed)
    lora = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    get_peft_model(lm, LoraConfig(**lora | settings)).save_pretrained(folder)  # type: ignore[arg-type]
    return folder
