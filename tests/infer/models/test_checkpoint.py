"""Model directories that are damaged or do not fit together are reported in one sentence."""

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
from infer import load
from infer.models.checkpoint import load_adaptive, load_model, load_ngrams, load_text
from infer.ngrams import FILE, NgramWeights
from tests.conftest import tiny_llama
from tests.infer.ngram_tables import make_table


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


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (truncate, "must be a causal model with weights, got "),
    (drop, "must have every weight of the model, got no model.layers.1.mlp.up_proj.weight"),
    (
        changed("config.json", intermediate_size=48),
        r"sizes in config.json, \(32, 48\) for model.layers.0.mlp.down_proj.weight, got \(32, 64\)",
    ),
    (changed("config.json", num_attention_heads=0), "must be a causal model with weights, got .* zero"),
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
    with pytest.raises(UserError, match=sentence) as output:
        load_model(folder, dtype="float32")
    assert "\n" not in str(output.value) and str(output.value).startswith(f"model={folder} must ")
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
        ({"adaptive_ids": [99999]}, "adaptive_ids must be among the model's 400 rows, got 99999"),
        ({"adaptive_ids": [-1]}, "adaptive_ids must be among the model's 400 rows, got -1"),
        ({"adaptive_ids": []}, r"at least one of adaptive_ids and L from 1 on, got \[\] and 3"),
        ({"L": 0}, "at least one of adaptive_ids and L from 1 on, got .* and 0"),
        ({"bos": 400}, "bos must be among the model's 400 rows, got 400"),
        ({"bos": "<s>"}, "bos must be int, got '<s>'"),
        ({"infilling": {"pre": 1, "suf": 2, "mid": 3, "eot": 400}}, "eot must be among the model's 400 rows"),
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
    with pytest.raises(UserError, match=f"adaptive.json.*{sentence}"):
        load_adaptive(tmp_path)


def test_a_tokenizer_whose_opening_id_has_no_row(base_dir: Path, tmp_path: Path) -> None:
    """An IndexError in the middle of decoding too."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(base_dir / name, tmp_path / name)
    changed("config.json", vocab_size=0)(tmp_path)
    with pytest.raises(
        UserError, match="tokenizer: the ids that open a text must be among the model's 0 rows, got"
    ):
        load_text(tmp_path)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"adaptive_ids": "67"}, "adaptive_ids must be list, got '67'"),
        ({"adaptive_ids": [6.7]}, "an id of adaptive_ids must be int, got 6.7"),
        ({"adaptive_ids": [True]}, "an id of adaptive_ids must be int, got True"),
        ({"L": "5"}, "L must be int, got '5'"),
        ({"L": 5.9}, "L must be int, got 5.9"),
        ({"gated": "false"}, "gated must be bool, got 'false'"),
        ({"bos": 1.5}, "bos must be int, got 1.5"),
        ({"control": ["<s>"]}, "an id of control must be int, got '<s>'"),
        ({"infilling": [1, 2, 3, 4]}, r"infilling must be dict, got \[1, 2, 3, 4\]"),
        ({"infilling": {"pre": 1, "suf": 2, "eot": 3}}, "infilling must have pre, suf, mid, eot, got no mid"),
        ({"infilling": {"pre": 1, "suf": 2, "mid": 3, "eot": 4.0}}, "an id of infilling must be int, got 4.0"),
        ({"ngrams": []}, r"ngrams must be numbers table and text and a list places, got \[\]"),
        ({"ngrams": {"table": "2", "text": 1, "places": [1]}}, "ngrams must be numbers table and text"),
        ({"ngrams": {"table": 2, "text": 1, "places": "1"}}, "ngrams must be numbers table and text"),
        ({"ngrams": {"table": 2, "text": 1}}, "ngrams must be numbers table and text"),
        ({"ngrams": {"table": 2, "text": None, "places": [1]}}, "ngrams must be numbers table and text"),
        ({"ngrams": {"table": 0, "text": 1, "places": [1]}}, "κ must be above 0 and at most 1000, got 0 and 1"),
        ({"ngrams": {"table": 2, "text": 10**999, "places": [1]}}, "κ must be above 0 and at most 1000"),
        ({"ngrams": {"table": 2, "text": 1, "places": []}}, "places must be weights from 0 to 4"),
        ({"ngrams": {"table": 2, "text": 1, "places": [float("nan")]}}, "places must be weights from 0 to 4"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_fields_of_another_type(model_dir: Path, tmp_path: Path, values: dict[str, Any], sentence: str) -> None:
    """They were read as what they might have meant: "67" as the two ids 6 and 7, 6.7 as 6, "false" as gated.
    A bos of 1.5 and a control piece's name were tracebacks in the middle of a prompt.
    """
    for name in ("config.json", "adaptive.json"):
        shutil.copyfile(model_dir / name, tmp_path / name)
    changed("adaptive.json", **values)(tmp_path)
    with pytest.raises(UserError, match=f"adaptive.json: {sentence}"):
        load_adaptive(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"L":' * 100_000, "\ufeff{}", '{"L": 1e999}', "[]", "", "{"])
def test_json_of_no_use(model_dir: Path, tmp_path: Path, text: str) -> None:
    """Brackets a hundred thousand deep were a RecursionError."""
    shutil.copyfile(model_dir / "config.json", tmp_path / "config.json")
    (tmp_path / "adaptive.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="adaptive.json(: adaptive_ids)? must") as output:
        load_adaptive(tmp_path)
    assert "\n" not in str(output.value)


@pytest.mark.parametrize(
    "damage",
    [
        changed("config.json", rope_parameters=2),
        changed("config.json", num_attention_heads="null"),
        changed("config.json", hidden_act=39),
        changed("config.json", vocab_size=None),
        changed("config.json", vocab_size="400"),
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        lambda folder: _sharded(folder, {"weight_map": {"a": {}}}),
        lambda folder: _sharded(folder, {"weight_map": {"a": "b", "c": 1.5}}),
        lambda folder: _sharded(folder, {}),
    ],
)
def test_what_the_library_meets_in_a_damaged_directory(
    model_dir: Path, tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    """A StrictDataclassError of several lines, a RecursionError, a TypeError, a KeyError, as tracebacks."""
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    with pytest.raises(UserError, match=r"(must .+, got|wanted .+, found) .+") as output:
        load(tmp_path, "float32")
    assert "\n" not in str(output.value)


@pytest.mark.parametrize("ids", [[None, ["a"]], "1", [1.5], {"id": 1}])
def test_what_is_no_id_ends_no_text(model_dir: Path, tmp_path: Path, ids: Any) -> None:
    """A list within the list of generation_config.json was a TypeError of frozenset()'s."""
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    changed("generation_config.json", eos_token_id=ids)(tmp_path)
    with pytest.raises(UserError, match=r"eos_token_id.*must be token ids, got|must be a causal model"):
        load(tmp_path, "float32")


def _sharded(folder: Path, index: dict[str, Any]) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_number_of_layers_with_a_digit_too_many(model_dir: Path, tmp_path: Path) -> None:
    """The library made two thousand million layers, for hours, before it looked for their weights."""
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    changed("config.json", num_hidden_layers=2**31)(tmp_path)
    with pytest.raises(
        UserError, match="must have weights of 2147483648 layers .config.json., got 21 weights in all"
    ):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize(("κ", "warnings"), [(2.0, 1), (None, 0)])
def test_a_table_that_an_export_had_and_that_is_gone_is_reported(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, κ: float | None, warnings: int
) -> None:
    """Every model without a table was warned of its lack."""
    for name in ("config.json", "adaptive.json"):
        shutil.copyfile(model_dir / name, tmp_path / name)
    assert load_ngrams(tmp_path) is None and not caplog.messages  # of an earlier version
    changed("adaptive.json", ngrams={"table": κ, "text": 0.5, "places": [0.3]})(tmp_path)
    assert load_adaptive(tmp_path).ngrams == NgramWeights(2.0, 0.5, (0.3,))
    assert load_ngrams(tmp_path) is None and len(caplog.messages) == warnings
    assert all(f"{tmp_path / FILE} is absent" in message for message in caplog.messages)
    make_table(tmp_path / FILE, [[1, 2, 3]], order=2, vocabulary=401)
    with pytest.raises(UserError, match="must be of at most the model's 400 ids, got 401. Delete it."):
        load_ngrams(tmp_path)
