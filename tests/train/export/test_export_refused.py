"""Training folders that are not what was trained, and places that cannot be written: each is one sentence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from conf import UserError, settings
from conf.stage import staged
from tests.train.export.runs import change, copy_of, export, refused
from train.export.__main__ import FACTS
from train.export.checkpoint_weights import CheckpointWeights
from train.export.config import ExportConfig


def test_checkpoints_that_cannot_be_exported_are_one_sentence(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert "found no such folder" in refused(tmp_path / "absent", out)
    run = copy_of(runs / "zero3", tmp_path / "run")
    (run / "manifest.json").rename(run / "aside.json")
    assert refused(run, out).endswith(
        "must be a finished folder of kind 'checkpoint', got no manifest.json in it"
    )
    (run / "aside.json").rename(run / "manifest.json")
    share = next(run.glob("checkpoints/*/*rank_1*optim_states.pt"))
    content = share.read_bytes()
    share.write_bytes(content[:-7])
    assert f"got none (step-000003: {share.name} has" in refused(run, out)
    share.unlink()
    assert f"got none (step-000003: {share.name}: No such file or directory)" in refused(run, out)
    shutil.rmtree(run / "checkpoints")
    assert "wanted a folder with checkpoints, found none" in refused(run, out)


def test_another_models_tokenizer_is_refused(runs: Path, tmp_path: Path) -> None:
    run = copy_of(runs / "zero1", tmp_path / "run")
    path, manifest = run / "model" / "tokenizer.json", run / "manifest.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"].pop()
    path.write_text(json.dumps(tokenizer))
    assert "wanted the tokenizer that was trained with, of at most 400 pieces, found another" in refused(
        run, tmp_path / "model"
    )
    # A folder of an earlier version does not say which it was.
    vocab = json.loads(manifest.read_text())["vocab"]
    change(manifest, tokenizer=None, vocab={**vocab, "eos": 5000})
    assert f"{path}: wanted a piece for the EOS 5000 of the training" in refused(run, tmp_path / "model")


def test_another_architecture_is_refused(runs: Path, tmp_path: Path) -> None:
    """config.json was not tied to the training: rope_theta times 1.5 was published."""
    run = copy_of(runs / "zero1", tmp_path / "run")
    config, out = run / "model" / "config.json", tmp_path / "model"
    change(config, rope_parameters={"rope_type": "default", "rope_theta": 15000.0})
    told = f"{config}: wanted the architecture that was trained, found the file changed since"
    assert refused(run, out, "verify=false") == told
    change(config, vocab_size=300)
    assert "wanted a model of at least 400 embedding rows, found 300" in refused(run, out)
    change(config, model_type=["llama"])  # was a TypeError: lists are no keys
    assert "wanted a model_type that Transformers has, found ['llama']" in refused(run, out)
    config.write_text("no JSON")
    assert f"{config} must be a JSON object, got" in refused(run, out)
    config.unlink()
    assert "wanted the model's config.json in" in refused(run, out)


@pytest.mark.parametrize(("layers", "found"), [(0, "of no shape here"), (2, "of no shape there")])
def test_an_architecture_of_other_weights_is_refused(
    runs: Path, tmp_path: Path, layers: int, found: str
) -> None:
    """In a folder of an earlier version. A layer less was published without it where verify=false; one more
    was a KeyError.
    """
    run = copy_of(runs / "zero1", tmp_path / "run")
    change(run / "manifest.json", architecture=None)
    change(run / "model" / "config.json", num_hidden_layers=layers, layer_types=None)
    told = refused(run, tmp_path / "model", "verify=false")
    assert (
        "wanted the architecture of the weights of step-000003, found model.layers." in told and found in told
    )


def test_code_beside_a_model_is_refused_by_name(runs: Path, tmp_path: Path) -> None:
    """The library asked on the terminal whether to run it."""
    run = copy_of(runs / "zero1", tmp_path / "run")
    change(run / "manifest.json", architecture=None)
    (run / "model" / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = run / "model" / "config.json"
    change(config, auto_map={"AutoConfig": "own.Config"}, model_type="own")
    told = refused(run, tmp_path / "model", "verify=false")
    assert "found own, and code of its own (auto_map={'AutoConfig': 'own.Config'})" in told
    change(config, model_type="llama")  # the library's own class is taken
    export(run, tmp_path / "model", "verify=false")
    assert "auto_map" not in (tmp_path / "model" / "config.json").read_text()
    assert not (tmp_path / "ran").exists()


def test_float32_weights_without_names_are_no_bfloat16_ones(runs: Path, tmp_path: Path) -> None:
    """A checkpoint of a version that wrote no names lost them silently: fp32 was bfloat16 in four bytes."""
    folder = next((runs / "zero0-bf16" / "checkpoints").iterdir())
    states = next(folder.glob("*model_states.pt"))
    held = torch.load(states, weights_only=False)
    del held["trained"]
    (tmp_path / folder.name).mkdir()
    torch.save(held, tmp_path / folder.name / states.name)
    copies = CheckpointWeights(tmp_path / folder.name, torch.bfloat16)
    whole = CheckpointWeights(folder, torch.bfloat16)
    assert copies.keys() == whole.keys() and all(torch.equal(copies[name], whole[name]) for name in whole)
    with pytest.raises(UserError, match=r"wanted the names of the float32 weights .* only dtype=bfloat16"):
        CheckpointWeights(tmp_path / folder.name)


def test_too_little_memory_of_the_device_is_one_sentence(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore.")

    monkeypatch.setattr("train.export.verify.measure", full)
    told = refused(runs / "zero1", tmp_path / "model")
    assert "found too little (CUDA out of memory. Tried to allocate 2 GiB.)" in told and "verify=false" in told


def test_an_output_folder_in_use_is_left_alone(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    with staged(out), pytest.raises(UserError, match=r"out=.*: another run is writing it"):
        export(runs / "zero1", out)
    (out / "mine").write_text("mine")
    with pytest.raises(UserError, match="must be a new or empty folder, got other files there"):
        export(runs / "zero1", out)
    assert [path.name for path in out.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("dtype=int8", "dtype: wanted bfloat16, float16 or float32, found int8"),
        ("shard_size=5", "shard_size: wanted digits and KB, MB, GB or TB, found 5"),
        ("verify_sequences=1", "verify_sequences: wanted at least 2, found 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(override: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        settings("export", ExportConfig, ["checkpoint=c", "out=o", override])


@pytest.mark.parametrize("name", FACTS)
def test_a_manifest_that_no_training_wrote_is_one_sentence(runs: Path, tmp_path: Path, name: str) -> None:
    """Each ended in a traceback, most of them after the weights were written."""
    run = copy_of(runs / "zero1", tmp_path / "run")
    for value in (None, 7 if name in ("settings", "vocab", "inputs") else {"x": 1}):
        change(run / "manifest.json", **{name: value})
        assert f"must have {name} of type" in refused(run, tmp_path / "model", "verify=false")


def test_links_in_the_models_folder_are_refused(runs: Path, tmp_path: Path) -> None:
    """generation_config.json as a link to any JSON file of this machine was exported, and might be pushed."""
    run, secret = copy_of(runs / "zero1", tmp_path / "run"), tmp_path / "secret.json"
    secret.write_text('{"password": "x"}')
    link = run / "model" / "generation_config.json"
    link.unlink(missing_ok=True)
    link.symlink_to(secret)
    assert f"{link}: wanted a file of the training, found a link to {secret}" in refused(
        run, tmp_path / "model"
    )
    link.unlink()
    (run / "model").rename(tmp_path / "elsewhere")
    (run / "model").symlink_to(tmp_path / "elsewhere")
    assert "found a link to" in refused(run, tmp_path / "model", "verify=false")
