"""Model directories that are damaged or do not fit together are reported in one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from conf import UserError
from infer import load
from infer.models.checkpoint import ModelDirectory
from tests.conftest import tiny_llama
from tests.infer.gated import adapted_copy


@pytest.fixture
def folder(model_dir: Path, tmp_path: Path) -> Path:
    shutil.copytree(model_dir, tmp_path / "model")
    return tmp_path / "model"


def changed(file: str, **values: Any) -> Callable[[Path], None]:
    """A JSON file of the directory with other values."""

    def change(folder: Path) -> None:
        result = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(result | values))

    return change


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def drop(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def sharded(index: dict[str, Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


NO_MODEL, ROWS = (
    "must be a causal model with weights, got ",
    "vocab_size must be a whole number, got ",
)
WIDTHS = r"sizes in config.json, \(32, 48\) for model.layers.0.mlp.down_proj.weight, got \(32, 64\)"
DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (truncate, NO_MODEL),
    (
        drop,
        "must have every weight of the model, got no model.layers.1.mlp.up_proj.weight",
    ),
    (changed("config.json", intermediate_size=48), WIDTHS),
    (changed("config.json", num_attention_heads=0), f"{NO_MODEL}.* zero"),
    # The library made two thousand million layers, for hours, before it looked for their weights.
    (
        changed("config.json", num_hidden_layers=2**31),
        "weights of 2147483648 layers .*, got 21 weights in all",
    ),
    (changed("config.json", rope_parameters=2), NO_MODEL),
    (changed("config.json", num_attention_heads="null"), NO_MODEL),
    (changed("config.json", hidden_act=39), NO_MODEL),
    (changed("config.json", vocab_size=None), NO_MODEL),
    (changed("config.json", vocab_size="400"), ROWS),
    (
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        "config.json must be .*, got ",
    ),
    (sharded({"weight_map": {"a": {}}}), NO_MODEL),
    (sharded({"weight_map": {"a": "b", "c": 1.5}}), NO_MODEL),
    (sharded({}), NO_MODEL),
    *(
        (
            changed("generation_config.json", eos_token_id=ids),
            f"eos_token_id.*must be token ids, got|{NO_MODEL}",
        )
        for ids in ([None, ["a"]], "1", [1.5], {"id": 1})
    ),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES)
def test_what_the_library_meets_in_a_damaged_directory(
    folder: Path,
    damage: Callable[[Path], Any],
    sentence: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """They were tracebacks of ten classes, some below a table; a missing tensor was drawn at random."""
    damage(folder)
    capfd.readouterr()
    with pytest.raises(UserError, match=sentence) as output:
        load(folder, "float32")
    assert "\n" not in str(output.value) and not "".join(capfd.readouterr())


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    config = LlamaConfig(
        **(tiny_llama().config.to_dict() | {"tie_word_embeddings": True})
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    lm = ModelDirectory(tmp_path).load(dtype="float32")
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight  # type: ignore[union-attr]


def test_weights_of_no_part_of_the_model_are_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The library's table of them was all that said so."""
    changed("config.json", num_hidden_layers=1)(folder)
    ModelDirectory(folder).load(dtype="float32")
    assert "model.layers.1.input_layernorm.weight" in caplog.text


def test_want_of_memory_is_no_fault_of_the_weights(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory."))
    monkeypatch.setattr(
        "infer.models.checkpoint.AutoModelForCausalLM.from_pretrained", full
    )
    with pytest.raises(torch.OutOfMemoryError):
        ModelDirectory(model_dir).load(dtype="float32")


NUMBERS, INFILLING = (
    "ngrams must be numbers table and text and a list places",
    {"pre": 1, "suf": 2, "mid": 3},
)
FIELDS: list[tuple[dict[str, Any], str]] = [
    (
        {"adaptive_ids": [99999]},
        "adaptive_ids must be among the model's 400 rows, got 99999",
    ),
    ({"adaptive_ids": [-1]}, "adaptive_ids must be among the model's 400 rows, got -1"),
    (
        {"adaptive_ids": []},
        r"at least one of adaptive_ids and L from 1 on, got \[\] and 3",
    ),
    ({"adaptive_ids": "67"}, "adaptive_ids must be list, got '67'"),
    ({"adaptive_ids": [6.7]}, "an id of adaptive_ids must be int, got 6.7"),
    ({"adaptive_ids": [True]}, "an id of adaptive_ids must be int, got True"),
    ({"L": 0}, "at least one of adaptive_ids and L from 1 on, got .* and 0"),
    ({"L": "5"}, "L must be int, got '5'"),
    ({"L": 5.9}, "L must be int, got 5.9"),
    ({"gated": "false"}, "gated must be bool, got 'false'"),
    ({"bos": 400}, "bos must be among the model's 400 rows, got 400"),
    ({"bos": 1.5}, "bos must be int, got 1.5"),
    ({"control": ["<s>"]}, "an id of control must be int, got '<s>'"),
    ({"infilling": [1, 2, 3, 4]}, r"infilling must be dict, got \[1, 2, 3, 4\]"),
    (
        {"infilling": {"pre": 1, "suf": 2, "eot": 3}},
        "infilling must have pre, suf, mid, eot, got no mid",
    ),
    (
        {"infilling": INFILLING | {"eot": 4.0}},
        "an id of infilling must be int, got 4.0",
    ),
    ({"infilling": INFILLING | {"eot": 400}}, "eot must be among the model's 400 rows"),
    ({"ngrams": []}, rf"{NUMBERS}, got \[\]"),
    ({"ngrams": {"table": "2", "text": 1, "places": [1]}}, NUMBERS),
    ({"ngrams": {"table": 2, "text": 1, "places": "1"}}, NUMBERS),
    ({"ngrams": {"table": 2, "text": 1}}, NUMBERS),
    ({"ngrams": {"table": 2, "text": None, "places": [1]}}, NUMBERS),
    (
        {"ngrams": {"table": 0, "text": 1, "places": [1]}},
        "κ must be above 0 and at most 1000, got 0 and 1",
    ),
    (
        {"ngrams": {"table": 2, "text": 10**999, "places": [1]}},
        "κ must be above 0 and at most 1000",
    ),
    (
        {"ngrams": {"table": 2, "text": 1, "places": []}},
        "places must be weights from 0 to 4",
    ),
    (
        {"ngrams": {"table": 2, "text": 1, "places": [float("nan")]}},
        "places must be weights from 0 to 4",
    ),
]


@pytest.mark.parametrize(
    ("values", "sentence"), FIELDS, ids=lambda value: str(value)[:30]
)
def test_fields_that_cannot_be(
    model_dir: Path, tmp_path: Path, values: dict[str, Any], sentence: str
) -> None:
    """They were read as what they might have meant, "67" as the two ids 6 and 7, "false" as gated."""
    for name in ("config.json", "adaptive.json"):
        shutil.copyfile(model_dir / name, tmp_path / name)
    changed("adaptive.json", **values)(tmp_path)
    with pytest.raises(UserError, match=f"adaptive.json.*{sentence}"):
        ModelDirectory(tmp_path).need_adaptive()


def test_a_tokenizer_whose_opening_id_has_no_row(folder: Path) -> None:
    (folder / "adaptive.json").unlink()
    changed("config.json", vocab_size=0)(folder)
    with pytest.raises(
        UserError, match="ids that open a text must be among the model's 0 rows, got"
    ):
        _ = ModelDirectory(folder).text


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"L":' * 100_000, "\ufeff{}", '{"L": 1e999}', "[]", "", "{"],
)
def test_json_of_no_use(model_dir: Path, tmp_path: Path, text: str) -> None:
    """Brackets a hundred thousand deep were a RecursionError."""
    shutil.copyfile(model_dir / "config.json", tmp_path / "config.json")
    (tmp_path / "adaptive.json").write_text(text, encoding="utf-8")
    with pytest.raises(
        UserError, match="adaptive.json(: adaptive_ids)? must"
    ) as output:
        ModelDirectory(tmp_path).need_adaptive()
    assert "\n" not in str(output.value)


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
    """Some changed the base model's weights, so that plain decoding was another model's."""
    folder = adapted_copy(
        model_dir, tmp_path / "model", **{"target_modules": ["q_proj"]} | settings
    )
    with pytest.raises(
        UserError, match="a gated adapter must be LoRA of linear layers, got"
    ):
        ModelDirectory(folder).load(dtype="float32")


def test_an_adapter_that_cannot_be_merged_is_one_sentence(
    model_dir: Path, tmp_path: Path
) -> None:
    """Peft's NotImplementedError came through."""
    more = {"target_modules": ["q_proj"], "alora_invocation_tokens": [5]}
    folder = adapted_copy(model_dir, tmp_path / "model", gated=False, **more)
    with pytest.raises(
        UserError, match="must be a LoRA adapter of this model, got aLoRA"
    ):
        ModelDirectory(folder).load(dtype="float32")


def test_an_adapter_of_adaptive_tokens_without_adaptive_json_is_refused(
    model_dir: Path, tmp_path: Path
) -> None:
    """A gated adapter whose adaptive.json was lost acted on every token: another text, in silence."""
    more: dict[str, Any] = {
        "target_modules": ["q_proj"],
        "trainable_token_indices": [6],
    }
    folder = adapted_copy(model_dir, tmp_path / "model", gated=False, **more)
    ModelDirectory(folder).load(dtype="float32", device="cpu")
    (folder / "adaptive.json").unlink()
    with pytest.raises(
        UserError,
        match="must have adaptive.json, since the adapter trained adaptive tokens",
    ):
        ModelDirectory(folder).load(dtype="float32", device="cpu")
