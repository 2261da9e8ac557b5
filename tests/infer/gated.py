"""Random gated adapters, written by peft."""

import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from conf.runs.files import read_json, write_json
from tests.conftest import tiny_llama


def write_adapter(
    lm: PreTrainedModel, folder: Path, *, seed: int = 1, **settings: Any
) -> Path:
    """Write an adapter of `lm`, which is changed; by default of rank 2, on all layers."""
    torch.manual_seed(seed)
    lora = {
        "r": 2,
        "target_modules": "all-linear",
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
    }
    get_peft_model(lm, LoraConfig(**lora | settings)).save_pretrained(folder)  # type: ignore[arg-type]
    return folder


def adapted_copy(
    model_dir: Path, folder: Path, *, gated: bool = True, **settings: Any
) -> Path:
    """A copy of the model directory with an adapter of these settings."""
    shutil.copytree(model_dir, folder)
    described = read_json(folder / "adaptive.json")
    write_json(folder / "adaptive.json", described | {"gated": gated})
    vocab = read_json(folder / "config.json")["vocab_size"]
    write_adapter(tiny_llama(vocab=vocab), folder / "adapter", **settings)
    return folder
