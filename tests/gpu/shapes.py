"""Shapes of the checked models, which have random weights."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

DEVICE = os.environ.get("GPU_CHECK_DEVICE", "cuda")
RANKS = torch.cuda.device_count() if DEVICE == "cuda" else 2
CODELLAMA_7B: Mapping[str, Any] = {
    "vocab_size": 32016,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 16384,
}
# With weights of this range the next token depends on all earlier tokens, and near-ties are rare.
LIVELY: Mapping[str, Any] = {
    "vocab_size": 499,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}


def random_model(
    shape: Mapping[str, Any], *, dtype: torch.dtype, device: str
) -> LlamaForCausalLM:
    """Return a model with random weights, always the same on one type of device."""
    torch.manual_seed(0)
    with torch.device(device):
        lm = LlamaForCausalLM._from_config(LlamaConfig(**shape), dtype=dtype)
    return lm.eval()
