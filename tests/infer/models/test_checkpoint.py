"""Test model directories: damaged ones, directories of other programs, and adapters."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from conf.errors import UserError
from conf.runs.files import read_json, write_json
from infer import DecodeConfig, generate, load
from infer.models import checkpoint
from infer.models.checkpoint import ModelDirectory
from tests.infer.conftest import ROWS
from tests.infer.engine.test_families import tiny
from tests.infer.gated import adapted_copy

PROMPT = "def f(x):"
Damage = Callable[[Path], Any]


def changed(file: str, **values: Any) -> Damage:
    """Return a function that changes values of a directory's JSON file."""

    def change(folder: Path) -> None:
        content = read_json(folder / file)
        write_json(folder / file, content | values)

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


adaptive = partial(changed, "adaptive.json")
NO_MODEL = "must be a causal model with weights, got "
NO_IDS = "adaptive.json must have the adaptive_ids and L of training, got "
DAMAGES: list[tuple[Damage, str]] = [
    (truncate, NO_MODEL),
    (drop, f"{NO_MODEL}no weight model.layers.1.mlp.up_proj.weight"),
    (changed("config.json", intermediate_size=48), NO_MODEL),
    (changed("config.json", num_attention_heads=0), f"{NO_MODEL}.* zero"),
    (written("config.json", "[" * 100_000), NO_MODEL),
    (written("tokenizer.json", "{"), "must have a tokenizer.json, got"),
    (written("adaptive.json", "{}"), f"{NO_IDS}'adaptive_ids'"),
    (adaptive(adaptive_ids=[ROWS]), f"{NO_IDS}id {ROWS}, .* the model's {ROWS} rows"),
    (adaptive(L=0), rf"{NO_IDS}adaptive_ids=\[\d+\] and L=0"),
    (adaptive(L=2.0), f"{NO_IDS}2.0, which is not an integer"),
    (adaptive(L=float("nan")), f"{NO_IDS}nan, which is not an integer"),
    (adaptive(L=10**9), f"{NO_IDS}.* and L=1000000000"),
    (adaptive(adaptive_ids=["6"]), f"{NO_IDS}'6', which is not an integer"),
    (adaptive(gated="no"), f"{NO_IDS}gated='no'"),
    (adaptive(bos="<s>"), f"{NO_IDS}id <s>, which is not among"),
    (adaptive(control=["<s>"]), f"{NO_IDS}'<s>', which is not an integer"),
    (adaptive(infilling=[1]), f"{NO_IDS}.*list"),
    (
        written("generation_config.json", '{"eos_token_id": "</s>"}'),
        "generation_config.json must have integers as eos_token_id, got '</s>'",
    ),
    # Bug: Transformers ignores it, and a chat model lost the ids that end its answers.
    (
        written("generation_config.json", "{"),
        "generation_config.json must be a JSON object, got",
    ),
    (
        lambda folder: os.mkfifo(folder / "adapter.json"),
        "adapter.json, a FIFO or device",
    ),
    (adaptive(infilling={"pre": 1, "suf": 2, "mid": 3}), f"{NO_IDS}.*eot"),
    (adaptive(ngrams={"table": 2, "text": 1}), f"{NO_IDS}ngrams must be numbers"),
    (
        adaptive(ngrams={"table": 0, "text": 1, "places": [1]}),
        f"{NO_IDS}ngrams must have",
    ),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES)
def test_a_damaged_directory_is_one_sentence(
    model_dir: Path, tmp_path: Path, damage: Damage, sentence: str
) -> None:
    folder = shutil.copytree(model_dir, tmp_path / "model")
    damage(folder)
    with pytest.raises(UserError, match=sentence) as error:
        load(folder, "float32")
    assert "\n" not in str(error.value)


def test_pickled_weights_and_a_slow_tokenizer_load(tmp_path: Path) -> None:
    """A directory like OPT's on the hub, with the files of GPT-2's slow tokenizer."""
    pieces = ["<s>", "<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    write_json(tmp_path / "vocab.json", vocab)
    (tmp_path / "merges.txt").write_text("")
    special = dict.fromkeys(["bos_token", "eos_token", "unk_token"], "</s>")
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True} | special
    write_json(tmp_path / "tokenizer_config.json", settings)
    lm = tiny("opt", ffn_dim=64, vocab_size=len(vocab), word_embed_proj_dim=32)
    lm.config.save_pretrained(tmp_path)
    torch.save(lm.state_dict(), tmp_path / "pytorch_model.bin")
    model = load(tmp_path, "float32")
    assert model.text.encode(PROMPT)[0] == 2  # </s> opens OPT's texts
    assert list(generate(model, PROMPT, DecodeConfig("plain", max_new_tokens=4)))


LORA: dict[str, Any] = {"target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "pissa"},
        {"use_dora": True},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
    ],
)
def test_a_gated_adapter_that_a_gate_cannot_close_is_refused(
    model_dir: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Some of these adapters change the base model's weights, even for plain decoding."""
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


def test_an_adapter_without_some_of_its_weights_is_refused(
    model_dir: Path, tmp_path: Path
) -> None:
    """Bug: layers with weights of other names in the adapter's file stayed unchanged."""
    folder = adapted_copy(model_dir, tmp_path / "model", gated=False, **LORA)
    file = folder / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    renamed = {
        name.replace("model.layers.1", "language_model.layers.1"): weight
        for name, weight in weights.items()
    }
    save_file(renamed, file)
    with pytest.raises(UserError, match="must be a LoRA adapter of this model, got"):
        ModelDirectory(folder).load(dtype="float32")


def test_weights_that_do_not_fit_the_free_memory_are_not_read(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Regression: the kernel killed a command without a message if the model exceeded the memory."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    changed("config.json", dtype="bfloat16")(folder)
    (folder / "model.safetensors").write_bytes(b"not read")
    lm = ModelDirectory(model_dir).load(dtype="float32", device="cpu")
    needed = 4 * lm.num_parameters()
    monkeypatch.setattr(
        checkpoint, "machine_memory", lambda swap=False: (needed - 1, 2 * needed)
    )
    with pytest.raises(UserError, match="memory must suffice for the weights") as error:
        load(folder, "float32", "cpu")
    assert f"model={folder} in float32: " in str(error.value)
    assert "End other programs or set dtype=bfloat16" in str(error.value)
    load(model_dir, "float16", "cpu")  # half as large
    assert not capsys.readouterr().err
    load(model_dir, "float32", "cpu")  # not converted, so it stays in its file
    assert "warning: memory must suffice" in capsys.readouterr().err


def test_a_lost_part_is_said(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: an export without its head or n-gram weights drafted worse without a message."""
    folder = adapted_copy(model_dir, tmp_path / "model")
    load(folder, "float32")  # it never had a head, nor a schema
    assert not caplog.messages
    content = read_json(folder / "adaptive.json")
    write_json(folder / "adaptive.json", content | {"schema": 1, "head": True})
    load(folder, "float32")
    weights, head = caplog.messages
    assert weights.startswith(
        f"{folder}/adaptive.json lost its ngrams: default weights"
    )
    assert head.startswith(
        f"{folder}/adapter/head.safetensors is absent: drafts do not"
    )


def test_a_kept_adapter_that_is_lost_is_an_error(
    model_dir: Path, tmp_path: Path
) -> None:
    """Regression: the text was the base model's, without a message."""
    folder = adapted_copy(model_dir, tmp_path / "model", gated=False)
    manifest = {"kind": "model", "settings": {"lora": "kept"}}
    write_json(folder / "manifest.json", manifest)
    load(folder, "float32")
    shutil.rmtree(folder / "adapter")
    with pytest.raises(UserError, match="must have its folder adapter/, got only"):
        load(folder, "float32")


def test_a_file_that_an_adapter_lost_is_not_taken_from_the_hub(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: peft asked the hub for the repository of the folder's name, and merged what it got."""
    monkeypatch.chdir(tmp_path)
    folder = adapted_copy(model_dir, Path("model"), gated=False)
    monkeypatch.setattr(checkpoint.PeftModel, "from_pretrained", pytest.fail)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / "adapter" / name).unlink()
        with pytest.raises(UserError, match=f"model/adapter must be .* got no {name}"):
            load(folder, "float32")


@pytest.mark.parametrize(
    ("values", "kernel", "chosen"),
    [
        ({"dtype": "bfloat16"}, True, "bfloat16"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, True, "bfloat16"),
        ({"dtype": "float32"}, True, "float32"),
        ({"dtype": "bfloat16", "model_type": "qwen3"}, True, "float32"),
        ({"dtype": "bfloat16", "hidden_act": "gelu"}, True, "float32"),
        ({"dtype": "bfloat16"}, False, "float32"),
    ],
)
def test_weights_in_bfloat16_stay_so_on_a_cpu_without_instructions_for_it(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, Any],
    kernel: bool,
    chosen: str,
) -> None:
    """dtype=auto took float32: the same numbers in twice the memory and time."""
    folder = shutil.copytree(model_dir, tmp_path / "model")
    config = read_json(folder / "config.json") | values
    config = {name: value for name, value in config.items() if value is not None}
    write_json(folder / "config.json", config)
    monkeypatch.setattr("conf.devices.dtype.cpu_has_bfloat16", lambda: False)
    monkeypatch.setattr(checkpoint, "cpu_has_bfloat16", lambda: False)
    monkeypatch.setattr(checkpoint, "bfloat16_kernel", lambda: kernel or None)
    assert ModelDirectory(folder).choose_dtype("auto", "cpu") == chosen
    assert capsys.readouterr().err.startswith(f"dtype=auto: {chosen}")
    assert ModelDirectory(folder).choose_dtype("float32", "cpu") == "float32"
