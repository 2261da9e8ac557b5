"""Models by their shapes, as LlamaConfig's settings, with random weights: nothing is downloaded.

PyTorch is imported late: names of shapes are checked before it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

Shape = Mapping[str, Any]

SHAPES: dict[str, Shape] = {
    "codellama_7b": {
        "vocab_size": 32016,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 16384,
    },
    "codellama_13b": {
        "vocab_size": 32016,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "max_position_embeddings": 16384,
    },
    "tiny": {
        "vocab_size": 199,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}
# Of weights this far apart the next token depends on all before it, and seldom nearly ties.
LIVELY: Shape = {
    "vocab_size": 499,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}


def random_model(shape: Shape, *, dtype: "torch.dtype", device: str) -> "LlamaForCausalLM":
    """Return the same weights each time on one kind of device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        lm = LlamaForCausalLM._from_config(LlamaConfig(**shape), dtype=dtype)
    return lm.eval()
