"""Exports of trainings under every ZeRO stage (runs.py): what is written and verified."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conf import UserError, settings
from conf.files import read_result
from conf.fingerprint import fingerprint_file
from data_prep.ngrams import TABLE
from data_prep.shards import Shards
from infer.models.checkpoint import ModelDirectory
from infer.ngrams import NgramWeights
from tests.train.export.runs import (
    ADAPTED,
    PLAIN,
    change,
    copy_of,
    export,
    logits,
    refused,
)
from train.config import LoraSettings
from train.export import ExportConfig, keeps_adapter
from train.export.weights import write_weights
from train.lora import PlainWeights

FLOAT32 = "dtype=float32"


@pytest.mark.parametrize("name", PLAIN)
def test_an_export_is_what_was_trained_to_the_last_bit(
    runs: Path, tmp_path: Path, name: str
) -> None:
    """Every weight is the optimizer's and, of a float32 training, so are the logits."""
    live = torch.load(runs / f"{name}.live")
    out = export(runs / name, tmp_path / "model", FLOAT32, "verify=false")
    written = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    assert written.keys() == live["masters"].keys()
    for weight, master in live["masters"].items():
        assert torch.equal(written[weight], master), weight
    if live["logits"].dtype == torch.float32:
        assert torch.equal(logits(out, live["ids"]), live["logits"])


def test_the_n_gram_table_of_the_data_is_exported(
    runs: Path, data_folder: Path, tmp_path: Path
) -> None:
    """Servers take every *.safetensors for weights unless there is an index."""
    out = export(runs / "causal", tmp_path / "model", FLOAT32, "verify=false")
    assert (out / TABLE).read_bytes() == (data_folder / TABLE).read_bytes()
    assert read_result(out / "manifest.json")["ngrams"] == fingerprint_file(out / TABLE)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    names = load_file(out / "model.safetensors")
    assert index["weight_map"] == dict.fromkeys(names, "model.safetensors")
    run = copy_of(runs / "causal", tmp_path / "run")
    (run / TABLE).unlink()
    out = export(run, tmp_path / "without", FLOAT32, "verify=false")
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["zero2-lora", "zero3-lora"])
def test_a_merged_adapter_acts_as_it_did_beside_the_weights(
    runs: Path, tmp_path: Path, name: str
) -> None:
    """W + BA rounds once where Wx + BAx rounds per row."""
    live = torch.load(runs / f"{name}.live")
    out = export(runs / name, tmp_path / "model", FLOAT32, "verify=false")
    difference = (logits(out, live["ids"]) - live["logits"].float()).abs().max()
    rounding = 1e-5 if live["logits"].dtype == torch.float32 else 0.05
    assert difference < rounding * live["logits"].abs().max()


@pytest.mark.parametrize("name", ADAPTED)
def test_a_kept_adapter_and_its_base_model_are_those_trained(
    runs: Path, tmp_path: Path, name: str
) -> None:
    masters = torch.load(runs / f"{name}.live")["masters"]
    overrides = (FLOAT32, "lora=kept", "verify=false")
    out = export(runs / name, tmp_path / "model", *overrides)
    written = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    adapter = load_file(out / "adapter" / "adapter_model.safetensors")
    for adapted, master in masters.items():
        if "lora_" in adapted or "trainable_tokens" in adapted:
            weight = adapter.pop(f"base_model.model.{adapted.replace('.default', '')}")
        else:
            plain = adapted.replace(".token_adapter.base_layer.", ".")
            weight = written.pop(plain.replace(".base_layer.", "."))
        assert torch.equal(weight, master), adapted
    assert not written and not adapter


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["zero2-tied", "zero3-lora", "zero3-gated", "causal"])
def test_the_directory_is_verified(
    runs: Path, tmp_path: Path, name: str, dtype: str
) -> None:
    out = export(runs / name, tmp_path / "model", f"dtype={dtype}", "shard_size=20KB")
    assert len(list(out.glob("model-*.safetensors"))) > 1
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["decontaminated"] == ["humaneval"]  # which infer.bench reads
    verified = manifest["verified"]
    assert verified["sequences"] == 4 and verified["weights"] >= 12
    assert (verified["logit_difference"] == 0) == (name != "zero3-lora")
    measured = verified["measured"]
    assert measured.get("masked") == verified["validation"].get("masked")
    for metric in measured.keys() & {"standard_loss", "masked_loss"}:
        expected = pytest.approx(verified["validation"][metric], rel=2e-3)
        assert measured[metric] == expected
    if name == "causal":
        assert not verified["drafts"] and not (out / "adaptive.json").exists()
        return
    ngrams = json.loads((out / "adaptive.json").read_text())["ngrams"]
    adaptive = ModelDirectory(out).need_adaptive()
    assert adaptive.ngrams == NgramWeights.from_json(ngrams) and adaptive.has_table
    assert f"{verified['drafts']['all']:.2f} by both" in (out / "README.md").read_text()
    decoder = (out / "custom_generate" / "generate.py").read_text()
    assert f"ngrams={ngrams}, gated={adaptive.gated})" in decoder


@pytest.mark.parametrize("row", ["unseen", "adaptive"])
@pytest.mark.parametrize("name", ["zero1", "zero2-lora"])
def test_a_wrong_weight_is_detected(
    runs: Path,
    data_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    row: str,
) -> None:
    """Also in the embedding of a token that the compared text lacks."""
    manifest = json.loads((runs / name / "manifest.json").read_text())
    adaptive = manifest["adaptive"]
    seen = {*Shards(data_folder, "held_out")[0].tokens.tolist(), *adaptive}
    unseen = next(id for id in range(manifest["vocab"]["size"]) if id not in seen)
    wrong_row = unseen if row == "unseen" else adaptive[0]

    def wrong(config: Any, weights: Any, out: Path, **settings: Any) -> None:
        nearly = dict(weights)
        nearly["model.embed_tokens.weight"][wrong_row, 3] *= 1.01
        write_weights(config, nearly, out, **settings)

    monkeypatch.setattr("train.export.weights.write_weights", wrong)
    message = refused(runs / name, tmp_path / "model", FLOAT32)
    assert "verify: model.embed_tokens.weight must equal the training's" in message


def test_a_wrong_adapter_is_detected(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(weights: PlainWeights, folder: Path) -> None:
        save_adapter(weights, folder)
        file = folder / "adapter_model.safetensors"
        adapter = load_file(file)
        name = next(name for name in adapter if "trainable_tokens" in name)
        adapter[name][0] *= 1.01
        save_file(adapter, file)

    save_adapter = PlainWeights.save_adapter
    monkeypatch.setattr(PlainWeights, "save_adapter", wrong)
    message = refused(runs / "zero2-lora", tmp_path / "model", "lora=kept", FLOAT32)
    assert "trainable_tokens" in message


def test_another_rope_is_detected(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits differ, though every weight is the training's."""

    def wrong(described: dict[str, Any], **_: Any) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 15000.0}
        return {**described, "rope_parameters": rope}

    monkeypatch.setattr("train.export.sidecars.served_config", wrong)
    message = refused(runs / "zero1", tmp_path / "model")
    assert "verify: logits must equal the training's within 0," in message


def damage(run: Path, fault: str) -> None:
    """Damage a copy of a training folder."""
    manifest = read_result(run / "manifest.json")
    shard = next(run.glob("checkpoints/*/*rank_1*optim_states.pt"))
    match fault:
        case "another validation":
            manifest["validation"][-1]["masked_loss"] += 1
        case "no validation":
            manifest["validation"].pop()
        case "unfinished":
            (run / "manifest.json").unlink()
            return
        case "no shards":
            manifest["places"]["data.path"] = str(run / "gone")
        case "other shards":
            manifest["inputs"]["data.path"] = "0"
        case "tokenizer":
            change(run / "model" / "tokenizer.json", truncation={})
        case "architecture":
            change(run / "model" / "config.json", num_hidden_layers=1)
        case "table":
            (run / TABLE).write_bytes((run / TABLE).read_bytes()[:-1] + b"x")
        case "short file":
            shard.write_bytes(shard.read_bytes()[:-7])
        case "no file":
            shard.unlink()
        case "no checkpoint":
            shutil.rmtree(run / "checkpoints")
    (run / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("another validation", "on 4 of its 4 held-out sequences when read back"),
        ("no validation", "must have a validated checkpoint, got none at step 3"),
        ("unfinished", "a finished folder of kind 'checkpoint'"),
        ("no shards", "got no such folder"),
        ("other shards", "got other shards. Give data.path=DIR, or verify=false"),
        ("tokenizer", "must be the tokenizer of the training, got a changed file"),
        ("architecture", "must be the architecture of the training, got a changed"),
        ("table", f"{TABLE} must be a whole n-gram table"),
        ("short file", "optim_states.pt has"),
        ("no file", "No such file or directory"),
        ("no checkpoint", "must contain checkpoints, got none"),
    ],
)
def test_a_damaged_training_is_refused(
    runs: Path, tmp_path: Path, fault: str, message: str
) -> None:
    run = copy_of(runs / "zero3", tmp_path / "run")
    damage(run, fault)
    assert message in refused(run, tmp_path / "model")


def test_shards_that_moved_are_given(
    runs: Path, data_folder: Path, tmp_path: Path
) -> None:
    run = copy_of(runs / "zero3", tmp_path / "run")
    damage(run, "no shards")
    overrides = (f"data.path={data_folder}", "verify_sequences=2")
    out = export(run, tmp_path / "model", *overrides)
    assert read_result(out / "manifest.json")["verified"]["sequences"] == 2


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("lora", [None, "merged", "kept"])
def test_a_gated_adapter_is_kept_and_another_if_the_setting_says_so(
    rank: int, gated: bool, lora: str | None
) -> None:
    config = ExportConfig("c", "o", lora=lora)
    trained = LoraSettings(rank=rank, gated=gated and rank > 0)
    if lora == ("merged" if trained.gated else "kept") and (trained.gated or not rank):
        with pytest.raises(UserError, match=f"lora={lora} must suit the adapter of c"):
            keeps_adapter(config, trained)
    else:
        assert keeps_adapter(config, trained) == (trained.gated or lora == "kept")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dtype=int8", "dtype must be bfloat16, float16 or float32, got int8"),
        ("lora=both", "lora must be merged or kept, got both"),
        ("verify_sequences=1", "verify_sequences must be at least 2, got 1"),
    ],
)
def test_invalid_settings_are_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings("export", ExportConfig, ["checkpoint=c", "out=o", override])
