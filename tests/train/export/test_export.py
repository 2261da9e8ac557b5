"""Exports of what was trained under every ZeRO stage, and what reading them back finds: see runs.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conf.fingerprint import fingerprint_file
from conf.sealed import read_result
from data_prep.ngrams import TABLE
from data_prep.shards import Shards
from infer.models.checkpoint import load_adaptive
from infer.ngrams import NgramWeights
from tests.train.export.runs import ADAPTED, PLAIN, copy_of, export, logits, refused
from train.export.acceptance import announce, count_sequences
from train.export.trained import open_trained
from train.export.weight_files import write_weights
from train.lora import PlainWeights


def check_round_trip(run: Path, out: Path) -> None:
    """Every weight is the optimizer's to the last bit, and in float32 training so are the logits."""
    live = torch.load(run.with_name(f"{run.name}.live"))
    export(run, out, "dtype=fp32", "verify=false")
    lm = AutoModelForCausalLM.from_pretrained(out)
    written = dict(lm.named_parameters())
    assert written.keys() == live["masters"].keys()
    for name, master in live["masters"].items():
        assert torch.equal(written[name], master), name
    if live["logits"].dtype == torch.float32:
        assert torch.equal(logits(out, live["ids"]), live["logits"])


@pytest.mark.parametrize("name", PLAIN)
def test_an_export_is_what_was_trained_to_the_last_bit(runs: Path, tmp_path: Path, name: str) -> None:
    check_round_trip(runs / name, tmp_path / "model")


def test_the_n_gram_table_of_the_data_goes_along(runs: Path, data_folder: Path, tmp_path: Path) -> None:
    """Servers take every *.safetensors for weights unless an index says which are."""
    table = (data_folder / TABLE).read_bytes()
    out = export(runs / "causal", tmp_path / "model", "dtype=fp32", "verify=false")
    assert (out / TABLE).read_bytes() == table
    assert read_result(out / "manifest.json")["ngrams"] == fingerprint_file(out / TABLE)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(load_file(out / "model.safetensors"), "model.safetensors")
    run = copy_of(runs / "causal", tmp_path / "run")
    (run / TABLE).write_bytes(table[:-1] + b"x")
    assert f"{TABLE} must be a whole n-gram table, got a checksum mismatch" in refused(run, tmp_path / "no")
    (run / TABLE).unlink()
    (run / TABLE).symlink_to(data_folder / TABLE)
    assert f"{TABLE}: wanted a file of the training, found a link" in refused(run, tmp_path / "no")
    (run / TABLE).unlink()
    out = export(run, tmp_path / "without", "dtype=fp32", "verify=false")
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["zero2-lora", "zero3-lora"])
def test_a_merged_adapter_acts_as_it_did_beside_the_weights(runs: Path, tmp_path: Path, name: str) -> None:
    """W + BA rounds once where Wx + BAx rounds per row."""
    live = torch.load(runs / f"{name}.live")
    out = export(runs / name, tmp_path / "model", "dtype=fp32", "verify=false")
    difference = (logits(out, live["ids"]) - live["logits"].float()).abs().max()
    assert difference < (1e-5 if live["logits"].dtype == torch.float32 else 0.05) * live["logits"].abs().max()


@pytest.mark.parametrize("name", ADAPTED)
def test_a_kept_adapter_and_its_base_model_are_those_trained(runs: Path, tmp_path: Path, name: str) -> None:
    live = torch.load(runs / f"{name}.live")["masters"]
    out = export(runs / name, tmp_path / "model", "dtype=fp32", "lora=kept", "verify=false")
    written = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    adapter = load_file(out / "adapter" / "adapter_model.safetensors")
    for adapted, master in live.items():
        if "lora_" in adapted or "trainable_tokens" in adapted:
            one = adapter.pop(f"base_model.model.{adapted.replace('.default', '')}")
        else:
            one = written.pop(adapted.replace(".token_adapter.base_layer.", ".").replace(".base_layer.", "."))
        assert torch.equal(one, master), adapted
    assert not written and not adapter


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["zero2-tied", "zero3-lora", "zero3-gated", "causal"])
def test_what_was_written_is_verified(runs: Path, tmp_path: Path, name: str, dtype: str) -> None:
    out = export(runs / name, tmp_path / "model", f"dtype={dtype}", "shard_size=20KB")
    assert len(list(out.glob("model-*.safetensors"))) > 1
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["decontaminated"] == ["humaneval"]  # which infer.quality asks for
    found = manifest["verified"]
    assert found["positions"] == 128 and found["agreement"] > 0.9 and found["sequences"] == 4
    assert found["weights"] >= 12
    assert (found["logit_difference"] == 0) == (name != "zero3-lora")
    assert found["validation"].keys() == found["measured"].keys() >= found["intervals"].keys()
    assert found["measured"].get("masked") == found["validation"].get("masked")
    for metric in found["measured"].keys() & {"standard_loss", "masked_loss"}:
        assert found["measured"][metric] == pytest.approx(found["validation"][metric], rel=2e-3)
    assert ("accepted" in found["intervals"]) == (name != "causal")
    check_ngrams(out, found["drafts"], adaptive=name != "causal")


def check_ngrams(out: Path, drafts: dict[str, float], *, adaptive: bool) -> None:
    """Weights were fitted, and every decoder reads them; nothing is fitted without adaptive tokens."""
    assert set(drafts) == ({"adaptive", "ngrams", "all"} if adaptive else set())
    if adaptive:
        described = json.loads((out / "adaptive.json").read_text())["ngrams"]
        assert load_adaptive(out).ngrams == NgramWeights.from_json(described) and load_adaptive(out).has_table
        assert f"| {drafts['all']:.2f} |" in (out / "README.md").read_text()
        if (out / "custom_generate").exists():
            decoder = (out / "custom_generate" / "generate.py").read_text()
            assert f"ngrams={described}, gated={load_adaptive(out).gated})" in decoder


@pytest.mark.parametrize("row", ["unseen", "adaptive"])
@pytest.mark.parametrize("name", ["zero1", "zero2-lora"])
def test_a_weight_that_was_written_wrong_is_found(
    runs: Path, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, row: str
) -> None:
    """Only logits of one sequence were compared: embeddings of tokens that it lacks, those of the adaptive ones
    among them, could be anything.
    """
    manifest = json.loads((runs / name / "manifest.json").read_text())
    seen = set(Shards(data_folder, "held_out")[0].tokens.tolist())
    unseen = next(id for id in range(manifest["vocab"]["size"]) if id not in {*seen, *manifest["adaptive"]})
    wrong_row = unseen if row == "unseen" else manifest["adaptive"][0]

    def wrong(config: Any, weights: Any, out: Path, **settings: Any) -> None:
        nearly = dict(weights)
        nearly["model.embed_tokens.weight"][wrong_row, 3] *= 1.01
        write_weights(config, nearly, out, **settings)

    monkeypatch.setattr("train.export.directory.write_weights", wrong)
    told = refused(runs / name, tmp_path / "model", "dtype=fp32")
    assert told.startswith(
        "verify: wanted the training's model.embed_tokens.weight from the directory read back"
    )


def test_an_adapter_that_was_written_wrong_is_found(
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
    assert "trainable_tokens" in refused(runs / "zero2-lora", tmp_path / "model", "lora=kept", "dtype=fp32")


def test_a_model_that_learned_something_else_is_found(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That there was no validation was found after hours of writing and measuring."""
    run = copy_of(runs / "zero1", tmp_path / "run")
    manifest = read_result(run / "manifest.json")
    manifest["validation"][-1]["masked_loss"] += 1
    (run / "manifest.json").write_text(json.dumps(manifest))
    told = refused(run, tmp_path / "model")
    assert "wanted masked_loss=" in told and "on 4 of its 4 held-out sequences with the model read back" in told
    manifest["validation"][-1]["step"] = 2
    monkeypatch.setattr("train.export.directory.export", None)  # is not reached
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "wanted a checkpoint that was validated, found that of step 3" in refused(run, tmp_path / "model")


def test_how_long_measuring_takes_is_said_before(runs: Path, data_folder: Path) -> None:
    """What was told to be a few minutes of a CPU were five hours of a 7B model. And the weights, which come
    from the disk for every sequence, were not counted: on a GPU they are most of it.
    """
    trained, cpu = open_trained(str(runs / "zero1")), torch.device("cpu")
    shards = Shards(data_folder, "held_out")
    assert count_sequences(trained, shards, None, cpu) == (4, 4)
    assert announce(trained, shards, count=4, every=4, device=cpu).endswith("4 of 4 held-out sequences")
    trained.manifest["parameters"] = 7_000_000_000 * 128  # its sequences are 128 times as long, its weights not
    told = announce(trained, shards, count=4, every=64, device=cpu)
    assert ": about 7.1 hours at 0.1 TFLOP/s on the cpu and 2 GB/s from the disk; verify_sequences=2" in told
    trained.manifest["parameters"] = 34_000_000_000
    told = announce(trained, shards, count=16, every=64, device=torch.device("cuda"))
    assert ": about 0.3 hours at 300 TFLOP/s on the cuda" in told


def test_shards_that_moved_are_named_and_others_refused(runs: Path, data_folder: Path, tmp_path: Path) -> None:
    run = copy_of(runs / "zero1", tmp_path / "run")
    manifest = read_result(run / "manifest.json")
    manifest["places"]["data.path"] = str(tmp_path / "gone")
    (run / "manifest.json").write_text(json.dumps(manifest))
    told = refused(run, tmp_path / "model")
    assert f"found nothing at {tmp_path / 'gone'}: give data.path=DIR, or verify=false" in told
    del manifest["places"]  # a folder of an earlier version
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "found no word of where they are" in refused(run, tmp_path / "model")
    other = copy_of(data_folder, tmp_path / "other")
    (other / "manifest.json").write_text((other / "manifest.json").read_text() + " ")
    told = refused(run, tmp_path / "model", f"data.path={other}")
    assert told == f"data.path={other}: wanted the shards that {run} was trained on, found others"
    export(run, tmp_path / "model", f"data.path={data_folder}", "verify_sequences=2")
    assert json.loads((tmp_path / "model" / "manifest.json").read_text())["verified"]["sequences"] == 2
