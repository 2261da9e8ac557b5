"""Model directories: damaged ones, other programs' ones, and their adapters."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from conf import UserError
from infer import DecodeConfig, generate, load
from infer.models.checkpoint import ModelDirectory
from tests.conftest import tiny_llama
from tests.infer.conftest import ROWS
from tests.infer.gated import adapted_copy

PROMPT = "def f(x):"
Damage = Callable[[Path], Any]


@pytest.fixture
def folder(model_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model_dir, tmp_path / "model")


def changed(file: str, **values: Any) -> Damage:
    """Return a function that changes values of a directory's JSON file."""

    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | values))

    return change


def written(file: str, text: str) -> Damage:
    return lambda folder: (folder / file).write_text(text)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def drop(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def slow_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("no JSON")


def adaptive(**values: Any) -> Damage:
    return changed("adaptive.json", **values)


NO_MODEL = "must be a causal model with weights, got "
NO_IDS = "adaptive.json must have the adaptive_ids and L of training, got "
INFILLING = {"pre": 1, "suf": 2, "mid": 3}
DAMAGES: list[tuple[Damage, str]] = [
    (truncate, NO_MODEL),
    (drop, f"{NO_MODEL}no weight model.layers.1.mlp.up_proj.weight"),
    (changed("config.json", intermediate_size=48), NO_MODEL),
    (changed("config.json", num_attention_heads=0), f"{NO_MODEL}.* zero"),
    (changed("config.json", vocab_size=None), NO_MODEL),
    (written("config.json", "[" * 100_000), NO_MODEL),
    (written("tokenizer.json", "{"), "must have a tokenizer.json, got"),
    (slow_tokenizer, "must have a tokenizer.json, got .*save_pretrained"),
    (written("adaptive.json", "{"), "adaptive.json must be JSON with adaptive_ids"),
    (written("adaptive.json", "{}"), f"{NO_IDS}'adaptive_ids'"),
    (adaptive(adaptive_ids=[ROWS]), f"{NO_IDS}id {ROWS}, .* the model's {ROWS} rows"),
    (adaptive(adaptive_ids=[-1]), f"{NO_IDS}id -1, "),
    (adaptive(adaptive_ids=[]), rf"{NO_IDS}adaptive_ids=\[\] and L=3"),
    (adaptive(adaptive_ids="67"), NO_IDS),
    (adaptive(L=0), rf"{NO_IDS}adaptive_ids=\[\d+\] and L=0"),
    (adaptive(bos=ROWS), f"{NO_IDS}id {ROWS}, "),
    (adaptive(infilling=INFILLING), f"{NO_IDS}.*eot"),
    (adaptive(infilling=INFILLING | {"eot": ROWS}), f"{NO_IDS}id {ROWS}, "),
    (adaptive(ngrams={"table": 2, "text": 1}), f"{NO_IDS}ngrams must be numbers"),
    (
        adaptive(ngrams={"table": 0, "text": 1, "places": [1]}),
        f"{NO_IDS}ngrams must have",
    ),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES)
def test_a_damaged_directory_is_one_sentence(
    folder: Path, damage: Damage, sentence: str
) -> None:
    damage(folder)
    with pytest.raises(UserError, match=sentence) as error:
        load(folder, "float32")
    assert "\n" not in str(error.value)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    config = tiny_llama().config.to_dict() | {"tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    lm: Any = ModelDirectory(tmp_path).load(dtype="float32")
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight


def test_pickled_weights_and_a_slow_tokenizer_load(tmp_path: Path) -> None:
    """A directory like OPT's on the hub, with the files of GPT-2's slow tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([PROMPT], trainer)
    tokenizer.model.save(str(tmp_path))
    special = dict.fromkeys(["bos_token", "eos_token", "unk_token"], "</s>")
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True} | special
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = OPTConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    config.save_pretrained(tmp_path)
    weights = OPTForCausalLM(config).state_dict()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    model = load(tmp_path, "float32")
    assert model.text.encode(PROMPT)[0] == 2  # </s> opens OPT's texts
    assert list(generate(model, PROMPT, DecodeConfig("plain", max_new_tokens=4)))


LORA: dict[str, Any] = {"target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["lm_head"]},
        {"layer_replication": [[0, 1], [0, 2]]},
        {"init_lora_weights": "pissa"},
        {"use_dora": True},
        {"bias": "all"},
        {"target_modules": ["embed_tokens"]},
        {"alora_invocation_tokens": [5]},
    ],
)
def test_a_gated_adapter_that_a_gate_cannot_close_is_refused(
    model_dir: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Some of them change the base model's weights, for plain decoding too."""
    folder = adapted_copy(model_dir, tmp_path / "model", **LORA | settings)
    with pytest.raises(
        UserError, match="a gated adapter must be LoRA of linear layers"
    ):
        ModelDirectory(folder).load(dtype="float32")


def test_an_ungated_adapter_is_merged(model_dir: Path, tmp_path: Path) -> None:
    base = ModelDirectory(model_dir).load(dtype="float32").state_dict()
    folder = adapted_copy(model_dir, tmp_path / "model", gated=False, **LORA)
    merged = ModelDirectory(folder).load(dtype="float32").state_dict()
    weights = load_file(folder / "adapter" / "adapter_model.safetensors")
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.q_proj"
        a, b = (weights[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        expected = base.pop(f"{name}.weight") + 8 / 2 * b @ a  # lora_alpha 8, r 2
        torch.testing.assert_close(merged.pop(f"{name}.weight"), expected)
    assert all(torch.equal(merged[name], weight) for name, weight in base.items())
    unsupported = LORA | {"alora_invocation_tokens": [5]}
    folder = adapted_copy(model_dir, tmp_path / "other", gated=False, **unsupported)
    with pytest.raises(UserError, match="must be a LoRA adapter of this model, got"):
        ModelDirectory(folder).load(dtype="float32")
