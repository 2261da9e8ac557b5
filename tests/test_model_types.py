"""Test every model type of docs/models.md from training to decoding.

A tiny random model of each type is trained with a gated adapter and with all weights, exported, and decoded
by three methods, alone and in a batch. Texts must equal the texts of Transformers' own generate.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from conf.architecture import why_unsupported
from conf.errors import UserError
from data_prep.vocab import TOKENIZER
from infer import DecodeConfig, load
from infer.engine.families import check_family
from tests.conftest import vocab_of
from tests.infer.engine.test_families import (
    EXPERTS,
    LATENT,
    MIXED,
    MULTIPLIERS,
    SIZES,
    tiny,
)
from tests.infer.library import tokens_of
from tests.train.export.runs import export, train

WINDOW = {"sliding_window": 9}
UPPER = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
#: Settings of each type's tiny model: windows shorter than the texts, experts, multipliers.
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
    "deepseek_v3": LATENT,
}
#: Types with layers that do not pass extra arguments to attention.
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


def make_runs(kind: str, folder: Path, data: Path) -> list[str]:
    """Write a base model and train it by each recipe; return the names of the runs."""
    base = folder / "base"
    lm = tiny(kind, vocab_size=vocab_of(data).size, **TYPES[kind])
    lm.save_pretrained(base)
    shutil.copytree(data / TOKENIZER, base, dirs_exist_ok=True)
    model = ["model=pretrained", f"model.path={base}"]
    runs = {
        name: [*model, *RUN, *recipe]
        for name, recipe in RECIPES.items()
        if name == "all" or kind not in NOT_GATED
    }
    train(folder, data, runs, ranks=1)
    return list(runs)


def by_generate(folder: Path) -> list[list[int]]:
    """Return the greedy texts of Transformers' generate."""
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
    kind: str, data_folder: Path, tmp_path: Path
) -> None:
    for name in make_runs(kind, tmp_path, data_folder):
        # test_export.py verifies weights and adapter of a gated run.
        options = ["dtype=float32", f"verify={str(name == 'all').lower()}"]
        out = export(tmp_path / name, tmp_path / f"{name}-model", *options)
        expected = by_generate(out)
        assert expected[0] != expected[1]
        model = load(out, "float32", "cpu")
        for method, decode in METHODS.items():
            if name == "gated":
                assert tokens_of(model, PROMPTS[:1], decode) == expected[:1], method
            assert tokens_of(model, PROMPTS, decode) == expected, method


def test_docs_list_the_tested_types() -> None:
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .* \| yes \| (.+) \| yes \| yes \|", page, re.M)
    assert [kind for kind, _ in rows] == list(TYPES)
    for kind, lora in rows:
        experts = any("expert" in name for name in TYPES[kind])
        expected = (
            "not gated" if kind in NOT_GATED else "no experts" if experts else "yes"
        )
        assert lora == expected, kind


def small_config(kind: str) -> Any:
    """Return a small configuration of a type, or its default if it does not accept small sizes."""
    config = AutoConfig.for_model(kind)
    known = {*config.to_dict(), *getattr(type(config), "attribute_map", {})}
    sizes = {name: size for name, size in SIZES.items() if name in known}
    sizes |= TYPES.get(kind, {})
    try:
        return AutoConfig.for_model(kind, **sizes)
    except StrictDataclassError:  # the architecture does not allow these sizes
        return config


@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_type_passes_or_is_refused_in_a_sentence(kind: str) -> None:
    """Test the configurations of all causal models in Transformers."""
    try:
        config = small_config(kind)
    except StrictDataclassError as error:  # its own defaults are invalid
        pytest.skip(str(error))
    reason = why_unsupported(config)
    assert kind not in TYPES or not reason
    if not reason:
        return
    assert re.match("(which|whose) ", reason) and "\n" not in reason
    with pytest.raises(UserError) as refusal:
        check_family(config, "model=DIR")
    sentence = f", got {config.model_type}, {reason}. Use another model."
    assert str(refusal.value).endswith(sentence)
