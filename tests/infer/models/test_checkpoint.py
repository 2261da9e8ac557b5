"""Model directories that are damaged or do not fit together are told in one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from conf import UserError
from infer.models.checkpoint import load_adaptive, load_model, load_text
from tests.conftest import tiny_llama


def changed(file: str, **values: Any) -> Callable[[Path], None]:
    """A JSON file of the directory with other values."""

    def change(folder: Path) -> None:
        found = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(found | values))

    return change


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def drop(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (truncate, "wanted a causal model with weights, found "),
    (drop, "wanted every weight of the model, found no model.layers.1.mlp.up_proj.weight"),
    (
        changed("config.json", intermediate_size=48),
        r"sizes that config.json says, \(32, 48\) for model.layers.0.mlp.down_proj.weight, found \(32, 64\)",
    ),
    (changed("config.json", num_attention_heads=0), "wanted a causal model with weights, found .* zero"),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES, ids=[d[1][:40] for d in DAMAGES])
def test_weights_and_configuration_that_do_not_fit(
    model_dir: Path, tmp_path: Path, damage: Callable[[Path], None], sentence: str, capfd
) -> None:
    """They ended in a SafetensorError, a RuntimeError below a table, a ZeroDivisionError; and a tensor
    that was missing was drawn at random.
    """
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    damage(folder)
    capfd.readouterr()
    with pytest.raises(UserError, match=sentence) as told:
        load_model(folder, dtype="float32")
    assert "\n" not in str(told.value) and str(told.value).startswith(f"model={folder}: ")
    printed = capfd.readouterr()
    assert not printed.out + printed.err


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    config = LlamaConfig(**(tiny_llama().config.to_dict() | {"tie_word_embeddings": True}))
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    lm = load_model(tmp_path, dtype="float32")
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight  # type: ignore[union-attr]


def test_weights_of_no_part_of_the_model_are_named(model_dir: Path, tmp_path: Path, caplog) -> None:
    """The library's table of them was all that said so."""
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    changed("config.json", num_hidden_layers=1)(tmp_path)
    load_model(tmp_path, dtype="float32")
    assert "model.layers.1.input_layernorm.weight" in caplog.text


def test_want_of_memory_is_no_fault_of_the_weights(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for `load` to tell."""

    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("infer.models.checkpoint.AutoModelForCausalLM.from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        load_model(model_dir, dtype="float32")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"adaptive_ids": [99999]}, "wanted adaptive_ids among the model's 400 rows, found 99999"),
        ({"adaptive_ids": [-1]}, "wanted adaptive_ids among the model's 400 rows, found -1"),
        ({"adaptive_ids": []}, r"at least one of adaptive_ids and L from 1 on, found \[\] and 3"),
        ({"L": 0}, "at least one of adaptive_ids and L from 1 on, found .* and 0"),
        ({"bos": 400}, "wanted bos among the model's 400 rows, found 400"),
        ({"bos": "<s>"}, "wanted adaptive_ids and L, found TypeError"),
        ({"infilling": {"pre": 1, "suf": 2, "mid": 3, "eot": 400}}, "wanted eot among the model's 400 rows"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_ids_that_the_model_has_no_row_for(
    model_dir: Path, tmp_path: Path, values: dict[str, Any], sentence: str
) -> None:
    """They were an IndexError in the middle of decoding, as was a model without adaptive ids."""
    for name in ("config.json", "adaptive.json"):
        shutil.copyfile(model_dir / name, tmp_path / name)
    changed("adaptive.json", **values)(tmp_path)
    with pytest.raises(UserError, match=f"adaptive.json: .*{sentence}"):
        load_adaptive(tmp_path)


def test_a_tokenizer_whose_opening_id_has_no_row(base_dir: Path, tmp_path: Path) -> None:
    """An IndexError in the middle of decoding too."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(base_dir / name, tmp_path / name)
    changed("config.json", vocab_size=0)(tmp_path)
    with pytest.raises(UserError, match="tokenizer: wanted what opens a text among the model's 0 rows, found"):
        load_text(tmp_path)
