"""Every model type of docs/models.md, from training to the texts of Transformers' own generate.

A tiny random model of each is trained, gated and with all weights, exported, and decoded by three methods,
alone and in a batch.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.vocab import TOKENIZER
from infer import DecodeConfig, load
from tests.conftest import make_once, vocab_of
from tests.infer.engine.test_families import EXPERTS, MIXED, MULTIPLIERS, tiny
from tests.infer.library import tokens_of
from tests.train.export.runs import export, train

WINDOW = {"sliding_window": 9}
UPPER = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
LATENT = {"kv_lora_rank": 16, "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "first_k_dense_replace": 1}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPED = {"q_lora_rank": 16, "n_group": 2, "topk_group": 1}
#: Settings of each type's tiny model: windows narrower than the texts, experts, factors.
TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "qwen2": UPPER,
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {},
    "gemma3_text": MIXED,
    "granite": MULTIPLIERS,
    "cohere": {"logit_scale": 0.3},
    "cohere2": MIXED | {"logit_scale": 0.3},
    "olmo2": {},
    "olmo3": MIXED,
    "phi": {},
    "phi3": WINDOW,
    "starcoder2": WINDOW | {"use_bias": True},
    "gpt_neox": {},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "stablelm": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": {},
    "seed_oss": {},
    "deepseek_v2": LATENT | {"q_lora_rank": None},
    "deepseek_v3": LATENT | GROUPED,
}
#: Whose layers do not pass arguments on to attention.
NOT_GATED = ("nemotron", "stablelm")
RECIPES = {"gated": ["lora.rank=4", "lora.gated=true", "optimizer.lr=1e-2"], "all": []}
RUN = ["steps=2", "save_every=2", "validate_every=2", "validate_sequences=1"]
RUN += ["global_batch=1", "micro_batch=1", "deepspeed=zero0", "objective=branch"]
PROMPTS = [[0, 20, 30, 40, 51, *range(60, 72)], [0, 77, 78]]
NEW = 12
METHODS = {
    "plain": DecodeConfig("plain", max_new_tokens=NEW),
    "sdsat": DecodeConfig("sdsat", max_new_tokens=NEW),
    "hybrid": DecodeConfig("hybrid", probes="all", nodes=5, max_new_tokens=NEW),
}


def runs_of(kind: str) -> list[str]:
    return [
        f"{kind}-{recipe}"
        for recipe in RECIPES
        if recipe == "all" or kind not in NOT_GATED
    ]


def make_models(folder: Path, data: Path) -> None:
    """Write a base model of each type and train it by each recipe."""
    size = vocab_of(data).size
    runs = {}
    for kind, settings in TYPES.items():
        base = folder / kind
        lm = tiny(kind, vocab_size=size, **settings)
        lm.save_pretrained(base)
        shutil.copytree(data / TOKENIZER, base, dirs_exist_ok=True)
        for name in runs_of(kind):
            recipe = RECIPES[name.rpartition("-")[2]]
            runs[name] = ["model=pretrained", f"model.path={base}", *RUN, *recipe]
    train(folder, data, runs, ranks=1)


@pytest.fixture(scope="session")
def models(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base models and training folders of all types."""
    return make_once(
        tmp_path_factory, "types", lambda folder: make_models(folder, data_folder)
    )


def by_generate(folder: Path) -> list[list[int]]:
    """Return the greedy texts of the library's model of a directory."""
    lm: Any = AutoModelForCausalLM.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        whole = lm.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, pad_token_id=1
        )
        texts.append(whole[0, len(prompt) :].tolist())
    return texts


@pytest.mark.parametrize("kind", TYPES)
def test_a_type_trains_exports_and_decodes(
    kind: str, models: Path, tmp_path: Path
) -> None:
    for name in runs_of(kind):
        out = export(models / name, tmp_path / name, "dtype=float32")
        expected = by_generate(out)
        assert expected[0] != expected[1]
        model = load(out, "float32", "cpu")
        for method, decode in METHODS.items():
            assert tokens_of(model, PROMPTS[:1], decode) == expected[:1], method
            assert tokens_of(model, PROMPTS, decode) == expected, method
