"""Exports of trainings under every ZeRO stage (runs.py): what is written, verified and refused."""

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
from train.export import ExportConfig
from train.export.__main__ import FACTS
from train.export.trained import open_trained
from train.export.verify import plan_measurement
from train.export.weights import CheckpointWeights, write_weights
from train.lora import PlainWeights


@pytest.mark.parametrize("name", PLAIN)
def test_an_export_is_what_was_trained_to_the_last_bit(
    runs: Path, tmp_path: Path, name: str
) -> None:
    """Every weight is the optimizer's and, of a float32 training, so are the logits."""
    live = torch.load(runs / f"{name}.live")
    out = export(runs / name, tmp_path / "model", "dtype=fp32", "verify=false")
    lm = AutoModelForCausalLM.from_pretrained(out)
    written = dict(lm.named_parameters())
    assert written.keys() == live["masters"].keys()
    for name, master in live["masters"].items():
        assert torch.equal(written[name], master), name
    if live["logits"].dtype == torch.float32:
        assert torch.equal(logits(out, live["ids"]), live["logits"])


def test_the_n_gram_table_of_the_data_is_exported(
    runs: Path, data_folder: Path, tmp_path: Path
) -> None:
    """Servers take every *.safetensors for weights unless there is an index."""
    table = (data_folder / TABLE).read_bytes()
    out = export(runs / "causal", tmp_path / "model", "dtype=fp32", "verify=false")
    assert (out / TABLE).read_bytes() == table
    assert read_result(out / "manifest.json")["ngrams"] == fingerprint_file(out / TABLE)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(
        load_file(out / "model.safetensors"), "model.safetensors"
    )
    run = copy_of(runs / "causal", tmp_path / "run")
    (run / TABLE).write_bytes(table[:-1] + b"x")
    assert f"{TABLE} must be a whole n-gram table, got a checksum mismatch" in refused(
        run, tmp_path / "no"
    )
    (run / TABLE).unlink()
    (run / TABLE).symlink_to(data_folder / TABLE)
    assert f"{TABLE} must be a file, got a link" in refused(run, tmp_path / "no")
    (run / TABLE).unlink()
    out = export(run, tmp_path / "without", "dtype=fp32", "verify=false")
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["zero2-lora", "zero3-lora"])
def test_a_merged_adapter_acts_as_it_did_beside_the_weights(
    runs: Path, tmp_path: Path, name: str
) -> None:
    """W + BA rounds once where Wx + BAx rounds per row."""
    live = torch.load(runs / f"{name}.live")
    out = export(runs / name, tmp_path / "model", "dtype=fp32", "verify=false")
    difference = (logits(out, live["ids"]) - live["logits"].float()).abs().max()
    assert (
        difference
        < (1e-5 if live["logits"].dtype == torch.float32 else 0.05)
        * live["logits"].abs().max()
    )


@pytest.mark.parametrize("name", ADAPTED)
def test_a_kept_adapter_and_its_base_model_are_those_trained(
    runs: Path, tmp_path: Path, name: str
) -> None:
    live = torch.load(runs / f"{name}.live")["masters"]
    out = export(
        runs / name, tmp_path / "model", "dtype=fp32", "lora=kept", "verify=false"
    )
    written = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    adapter = load_file(out / "adapter" / "adapter_model.safetensors")
    for adapted, master in live.items():
        if "lora_" in adapted or "trainable_tokens" in adapted:
            weight = adapter.pop(f"base_model.model.{adapted.replace('.default', '')}")
        else:
            plain = adapted.replace(".token_adapter.base_layer.", ".").replace(
                ".base_layer.", "."
            )
            weight = written.pop(plain)
        assert torch.equal(weight, master), adapted
    assert not written and not adapter


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["zero2-tied", "zero3-lora", "zero3-gated", "causal"])
def test_the_directory_is_verified(
    runs: Path, tmp_path: Path, name: str, dtype: str
) -> None:
    out = export(runs / name, tmp_path / "model", f"dtype={dtype}", "shard_size=20KB")
    assert len(list(out.glob("model-*.safetensors"))) > 1
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["decontaminated"] == ["humaneval"]  # which infer.bench asks for
    verified = manifest["verified"]
    assert (
        verified["positions"] == 128
        and verified["agreement"] > 0.9
        and verified["sequences"] == 4
    )
    assert verified["weights"] >= 12
    assert (verified["logit_difference"] == 0) == (name != "zero3-lora")
    measured, validation = verified["measured"], verified["validation"]
    assert validation.keys() == measured.keys() >= verified["intervals"].keys()
    assert measured.get("masked") == validation.get("masked")
    for metric in measured.keys() & {"standard_loss", "masked_loss"}:
        assert measured[metric] == pytest.approx(validation[metric], rel=2e-3)
    assert ("accepted" in verified["intervals"]) == (name != "causal")
    check_ngrams(out, verified["drafts"], adaptive=name != "causal")


def check_ngrams(out: Path, drafts: dict[str, float], *, adaptive: bool) -> None:
    """Check that weights were fitted and decoders read them; none without adaptive tokens."""
    assert set(drafts) == ({"adaptive", "ngrams", "all"} if adaptive else set())
    if adaptive:
        described = json.loads((out / "adaptive.json").read_text())["ngrams"]
        loaded = ModelDirectory(out).need_adaptive()
        assert loaded.ngrams == NgramWeights.from_json(described) and loaded.has_table
        assert f"| {drafts['all']:.2f} |" in (out / "README.md").read_text()
        if (out / "custom_generate").exists():
            decoder = (out / "custom_generate" / "generate.py").read_text()
            assert (
                f"ngrams={described}, gated={ModelDirectory(out).need_adaptive().gated})"
                in decoder
            )


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
    """Only logits of one sequence were compared: embeddings of tokens that it lacks could be anything."""
    manifest = json.loads((runs / name / "manifest.json").read_text())
    seen = set(Shards(data_folder, "held_out")[0].tokens.tolist())
    unseen = next(
        id
        for id in range(manifest["vocab"]["size"])
        if id not in {*seen, *manifest["adaptive"]}
    )
    wrong_row = unseen if row == "unseen" else manifest["adaptive"][0]

    def wrong(config: Any, weights: Any, out: Path, **settings: Any) -> None:
        nearly = dict(weights)
        nearly["model.embed_tokens.weight"][wrong_row, 3] *= 1.01
        write_weights(config, nearly, out, **settings)

    monkeypatch.setattr("train.export.weights.write_weights", wrong)
    message = refused(runs / name, tmp_path / "model", "dtype=fp32")
    assert message.startswith(
        "verify: model.embed_tokens.weight must equal the training's"
    )


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
    assert "trainable_tokens" in refused(
        runs / "zero2-lora", tmp_path / "model", "lora=kept", "dtype=fp32"
    )


def test_another_validation_is_detected(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing validation was an error only after hours of writing and measuring."""
    run = copy_of(runs / "zero1", tmp_path / "run")
    manifest = read_result(run / "manifest.json")
    manifest["validation"][-1]["masked_loss"] += 1
    (run / "manifest.json").write_text(json.dumps(manifest))
    message = refused(run, tmp_path / "model")
    assert (
        "masked_loss must be" in message
        and "on 4 of its 4 held-out sequences when read back" in message
    )
    manifest["validation"][-1]["step"] = 2
    monkeypatch.setattr("train.export.sidecars.write_sidecars", None)  # is not reached
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "must have a validated checkpoint, got none at step 3" in refused(
        run, tmp_path / "model"
    )


def test_the_time_of_measuring_is_printed(runs: Path, data_folder: Path) -> None:
    """The estimate for a 7B model was minutes instead of five hours; reading weights was not counted."""
    trained, cpu = open_trained(str(runs / "zero1")), torch.device("cpu")
    shards = Shards(data_folder, "held_out")
    count, every, sentence = plan_measurement(trained, shards, None, cpu)
    assert (count, every) == (4, 4) and sentence.endswith("4 of 4 held-out sequences")
    trained.manifest["parameters"] = (
        7_000_000_000 * 128
    )  # as if sequences were 128 times as long
    count, _, sentence = plan_measurement(trained, shards, None, cpu)
    message = ": about 7.1 hours at 0.1 TFLOP/s on the cpu and 2 GB/s from the disk; verify_sequences=2"
    assert count == 4 and message in sentence
    trained.manifest["parameters"] = 4 * 34_000_000_000
    _, _, sentence = plan_measurement(trained, shards, 4, torch.device("cuda"))
    assert ": about 0.3 hours at 300 TFLOP/s on the cuda" in sentence


def test_shards_that_moved_are_named_and_others_refused(
    runs: Path, data_folder: Path, tmp_path: Path
) -> None:
    run = copy_of(runs / "zero1", tmp_path / "run")
    manifest = read_result(run / "manifest.json")
    manifest["places"]["data.path"] = str(tmp_path / "gone")
    (run / "manifest.json").write_text(json.dumps(manifest))
    message = refused(run, tmp_path / "model")
    assert (
        f"got nothing at {tmp_path / 'gone'}. Give data.path=DIR, or verify=false"
        in message
    )
    del manifest["places"]  # a folder of an earlier version
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "got nothing at an unknown place" in refused(run, tmp_path / "model")
    other = copy_of(data_folder, tmp_path / "other")
    (other / "manifest.json").write_text((other / "manifest.json").read_text() + " ")
    message = refused(run, tmp_path / "model", f"data.path={other}")
    assert (
        message
        == f"data.path={other} must be the shards that {run} was trained on, got other shards."
    )
    export(run, tmp_path / "model", f"data.path={data_folder}", "verify_sequences=2")
    assert (
        json.loads((tmp_path / "model" / "manifest.json").read_text())["verified"][
            "sequences"
        ]
        == 2
    )


def test_unusable_checkpoints_are_one_sentence(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert "no such folder" in refused(tmp_path / "absent", out)
    run = copy_of(runs / "zero3", tmp_path / "run")
    (run / "manifest.json").rename(run / "aside.json")
    assert "a finished folder of kind 'checkpoint'" in refused(run, out)
    (run / "aside.json").rename(run / "manifest.json")
    share = next(run.glob("checkpoints/*/*rank_1*optim_states.pt"))
    content = share.read_bytes()
    share.write_bytes(content[:-7])
    assert f"(step-000003: {share.name} has" in refused(run, out)
    share.unlink()
    assert f"(step-000003: {share.name}: No such file or directory)" in refused(
        run, out
    )
    shutil.rmtree(run / "checkpoints")
    assert "must contain checkpoints, got none" in refused(run, out)


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("tokenizer.json", "tokenizer", {"truncation": {}}),
        # config.json with rope_theta times 1.5 was published
        (
            "config.json",
            "architecture",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 15000.0}},
        ),
    ],
)
def test_another_models_file_is_refused(
    runs: Path, tmp_path: Path, name: str, kind: str, value: dict[str, Any]
) -> None:
    run = copy_of(runs / "zero1", tmp_path / "run")
    change(run / "model" / name, **value)
    message = refused(run, tmp_path / "model", "verify=false")
    assert (
        f"{run / 'model' / name} must be the {kind} of the training, got a changed file"
        in message
    )


def test_what_is_no_config_is_refused(runs: Path, tmp_path: Path) -> None:
    run = copy_of(runs / "zero1", tmp_path / "run")
    config, out = run / "model" / "config.json", tmp_path / "model"
    change(config, model_type=["llama"])  # was a TypeError: lists are no keys
    assert "must have a model_type of Transformers, got ['llama']" in refused(run, out)
    config.write_text("no JSON")
    assert "a model's config.json" in refused(run, out)
    config.unlink()
    assert "a model's config.json" in refused(run, out)


@pytest.mark.parametrize(
    ("layers", "place"), [(0, "of shape None here"), (2, "None there")]
)
def test_an_architecture_of_other_weights_is_refused(
    runs: Path, tmp_path: Path, layers: int, place: str
) -> None:
    """In a folder of an earlier version a layer less was published unverified; one more was a KeyError."""
    run = copy_of(runs / "zero1", tmp_path / "run")
    change(run / "manifest.json", architecture=None)
    change(run / "model" / "config.json", num_hidden_layers=layers, layer_types=None)
    message = refused(run, tmp_path / "model", "verify=false")
    assert (
        "must fit the weights of step-000003, got model.layers." in message
        and place in message
    )


def test_code_beside_a_model_is_refused(runs: Path, tmp_path: Path) -> None:
    """Transformers asked on the terminal whether to run it."""
    run = copy_of(runs / "zero1", tmp_path / "run")
    change(run / "manifest.json", architecture=None)
    (run / "model" / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = run / "model" / "config.json"
    change(config, auto_map={"AutoConfig": "own.Config"}, model_type="own")
    message = refused(run, tmp_path / "model", "verify=false")
    assert "got own with auto_map={'AutoConfig': 'own.Config'}" in message
    change(config, model_type="llama")  # the library's own class is taken
    export(run, tmp_path / "model", "verify=false")
    assert "auto_map" not in (tmp_path / "model" / "config.json").read_text()
    assert not (tmp_path / "ran").exists()


def test_float32_weights_without_names_are_no_bfloat16_ones(
    runs: Path, tmp_path: Path
) -> None:
    """Without names, of an earlier version, fp32 was bfloat16 in four bytes."""
    folder = next((runs / "zero0-bf16" / "checkpoints").iterdir())
    states = next(folder.glob("*model_states.pt"))
    value = torch.load(states, weights_only=False)
    del value["trained"]
    (tmp_path / folder.name).mkdir()
    torch.save(value, tmp_path / folder.name / states.name)
    copies = CheckpointWeights(tmp_path / folder.name, torch.bfloat16)
    whole = CheckpointWeights(folder, torch.bfloat16)
    assert copies.keys() == whole.keys() and all(
        torch.equal(copies[name], whole[name]) for name in whole
    )
    with pytest.raises(
        UserError, match=r"must name its float32 weights.* with dtype=bfloat16"
    ):
        CheckpointWeights(tmp_path / folder.name)


def test_too_little_memory_of_the_device_is_one_sentence(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2 GiB.\nMore."
        )

    monkeypatch.setattr("train.export.verify.measure", full)
    message = refused(runs / "zero1", tmp_path / "model")
    assert "got too little (CUDA out of memory. Tried to allocate 2 GiB.)" in message
    assert "verify=false" in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dtype=int8", "dtype must be bfloat16, float16 or float32, got int8"),
        ("shard_size=5", "shard_size must be digits and KB, MB, GB or TB, got 5"),
        ("verify_sequences=1", "verify_sequences must be at least 2, got 1"),
        *(
            (f"push={name}", "push must be a name on the hub")
            for name in ("model", "a/b/c", "/c", "a://b/c")
        ),
    ],
)
def test_invalid_settings_are_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings("export", ExportConfig, ["checkpoint=c", "out=o", override])


@pytest.mark.parametrize("name", ["settings", "vocab", *FACTS])
def test_a_manifest_that_training_did_not_write_is_one_sentence(
    runs: Path, tmp_path: Path, name: str
) -> None:
    """Each was a traceback, most of them after the weights were written."""
    run = copy_of(runs / "zero1", tmp_path / "run")
    change(run / "manifest.json", **{name: None})
    message = refused(run, tmp_path / "model", "verify=false")
    assert (
        f"manifest.json must be as train writes it, got an error at '{name}'" in message
    )


def test_links_in_the_models_folder_are_refused(runs: Path, tmp_path: Path) -> None:
    """generation_config.json as a link to any JSON file of this machine was exported."""
    run, secret = copy_of(runs / "zero1", tmp_path / "run"), tmp_path / "secret.json"
    secret.write_text('{"password": "x"}')
    link = run / "model" / "generation_config.json"
    link.unlink(missing_ok=True)
    link.symlink_to(secret)
    assert f"{link} must be a file, got a link to {secret}" in refused(
        run, tmp_path / "model"
    )
    link.unlink()
    (run / "model").rename(tmp_path / "elsewhere")
    (run / "model").symlink_to(tmp_path / "elsewhere")
    assert "got a link to" in refused(run, tmp_path / "model", "verify=false")
