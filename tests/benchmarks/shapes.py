"""Random models and held-out prompts for benchmarks."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conf.text.rows import read_rows
from infer.bench.prompts import Prompt
from infer.models.checkpoint import ModelDirectory

# hidden size, layers, heads, intermediate size, vocabulary
SIZES = {
    "15M": (288, 6, 6, 768, 32000),
    "30M": (512, 8, 8, 1408, 4096),
    "110M": (768, 12, 12, 2048, 32000),
    "1.1B": (2048, 22, 32, 5632, 32000),
}


def random_llama(size: str, dtype: str) -> LlamaForCausalLM:
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
    return LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype)).eval()


def held_out_prompts(model: str, path: Path, count: int) -> list[Prompt]:
    """Return prompts from the first `count` long texts: the first half of each, at most 300 tokens."""
    text = ModelDirectory(model).text
    texts = [row["content"] for row in read_rows(path)]
    halves = [whole[: len(whole) // 2] for whole in texts if len(whole) > 200][:count]
    ids = [tuple(text.encode(half)[:300]) for half in halves]
    return [Prompt(str(n), ids[n]) for n, half in enumerate(halves)]
