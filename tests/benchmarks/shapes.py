"""Llamas of given sizes with random weights, for benchmarks: a draft's, stories15M, stories110M, and 1.1B."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {  # hidden, layers, heads, intermediate, vocabulary
    "0.4M": (128, 1, 2, 352, 512),
    "5M": (256, 6, 4, 704, 512),
    "15M": (288, 6, 6, 768, 32000),
    "110M": (768, 12, 12, 2048, 32000),
    "1.1B": (2048, 22, 32, 5632, 32000),
}


def random_llama(size: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """Random weights, ready to decode."""
    hidden, layers, heads, intermediate, vocab = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4 if size == "1.1B" else heads,
        vocab_size=vocab,
        max_position_embeddings=16384,
        tie_word_embeddings=size in ("15M", "110M"),
    )
    return LlamaForCausalLM._from_config(config, dtype=dtype).eval()
