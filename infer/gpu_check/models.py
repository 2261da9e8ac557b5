"""Models of a shape with random weights, made on the device: nothing is downloaded."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infer.engine.attention import NAME, register
from infer.gpu_check.shapes import Shape


def random_model(shape: Shape, *, dtype: torch.dtype, device: str) -> LlamaForCausalLM:
    """The same weights each time on one kind of device."""
    register()
    torch.manual_seed(0)
    with torch.device(device):
        lm = LlamaForCausalLM._from_config(LlamaConfig(**shape), attn_implementation=NAME, dtype=dtype)
    return lm.eval()
