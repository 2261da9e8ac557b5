"""Models of a shape with random weights, made on the device: nothing is downloaded."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infer.gpu_check.shapes import Shape


def random_model(shape: Shape, *, dtype: torch.dtype, device: str) -> LlamaForCausalLM:
    """The same weights each time on one kind of device."""
    torch.manual_seed(0)
    with torch.device(device):
        lm = LlamaForCausalLM._from_config(LlamaConfig(**shape), dtype=dtype)
    return lm.eval()
