"""Test exports of trainings with every ZeRO stage (runs.py): files, weights and verification."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

from conf.adapter import WEIGHTS
from conf.errors import UserError
from conf.runs.files import read_json, read_result
from conf.runs.fingerprint import fingerprint_file
from data_prep.ngrams import TABLE
from infer import DecodeConfig, load
from infer.models.checkpoint import ModelDirectory
from infer.ngrams import NgramWeights
from tests import warm
from tests.infer.library import tokens_of
from tests.train.export.runs import (
    ADAPTED,
    MIXTURES,
    PLAIN,
    RUNS,
    change,
    export,
    logits,
    refused,
)
from tests.train.resume_worker import RECIPE
from train.config import LoraSettings
from train.export import ExportConfig, keeps_adapter
from train.export.verify import compared_ids
from train.export.weights import write_weights

FLOAT32 = "dtype=float32"
MIXTURE_PROMPTS = [[20, 30, 40, 51], [77, 78], [99] * 7]


@pytest.mark.parametrize("name", PLAIN)
def test_an_export_equals_the_trained_model_bit_for_bit(
    runs: Path, tmp_path: Path, name: str
) -> None:
    """Weights equal the optimizer's; after training in float32 the logits are equal, too."""
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
    """Without an index, servers would load the table's *.safetensors as weights."""
    out = export(runs / "causal", tmp_path / "model", FLOAT32, "verify=false")
    assert (out / TABLE).read_bytes() == (data_folder / TABLE).read_bytes()
    assert read_result(out / "manifest.json")["ngrams"] == fingerprint_file(out / TABLE)
    index = read_json(out / "model.safetensors.index.json")
    names = load_file(out / "model.safetensors")
    assert index["weight_map"] == dict.fromkeys(names, "model.safetensors")


@pytest.mark.parametrize("name", ["zero2-lora", "zero3-lora"])
def test_a_merged_adapter_has_the_same_logits(
    runs: Path, tmp_path: Path, name: str
) -> None:
    """The tolerance is for rounding: W + BA rounds once, Wx + BAx rounds for each row."""
    live = torch.load(runs / f"{name}.live")
    out = export(runs / name, tmp_path / "model", FLOAT32, "verify=false")
    difference = (logits(out, live["ids"]) - live["logits"].float()).abs().max()
    rounding = 1e-5 if live["logits"].dtype == torch.float32 else 0.05
    assert difference < rounding * live["logits"].abs().max()


@pytest.mark.parametrize("name", ADAPTED)
def test_a_kept_adapter_and_its_base_model_equal_the_trained_weights(
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
    manifest = read_json(out / "manifest.json")
    assert manifest["decontaminated"] == ["humaneval"]  # infer.bench reads it
    verified = manifest["verified"]
    assert verified["weights"] >= 12
    assert (verified["logit_difference"] == 0) == (name != "zero3-lora")
    if name == "causal":
        assert not (out / "adaptive.json").exists()
        return
    ngrams = read_json(out / "adaptive.json")["ngrams"]
    adaptive = ModelDirectory(out).need_adaptive()
    assert adaptive.ngrams == NgramWeights.from_json(ngrams) and adaptive.has_table
    decoder = (out / "custom_generate" / "generate.py").read_text()
    end = f"ngrams={ngrams}, gated={adaptive.gated}, head={adaptive.has_head})"
    assert end in decoder
    assert adaptive.has_head == (out / "adapter" / "head.safetensors").is_file()


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_is_adapted_exported_and_decoded(
    runs: Path, tmp_path: Path, name: str
) -> None:
    """Bug: the export ended in a KeyError, because peft had replaced experts and routers."""
    out = export(runs / name, tmp_path / "model", FLOAT32)
    verified = read_json(out / "manifest.json")["verified"]
    assert (verified["logit_difference"] == 0) == ("gated" in name)
    if "gated" in name:
        config = read_json(out / "adapter" / "adapter_config.json")
        words = {target.rpartition(".")[2] for target in config["target_modules"]}
        assert words == {"q_proj", "k_proj", "v_proj", "o_proj"}
        assert not config["target_parameters"] and not config["rank_pattern"]
    model = load(out, "float32", "cpu")
    plain, drafted = (
        tokens_of(model, MIXTURE_PROMPTS, DecodeConfig(method, max_new_tokens=24))
        for method in ("plain", "hybrid")
    )
    assert drafted == plain and len({tuple(text) for text in plain}) == 3


@pytest.mark.parametrize("name", ["zero1-qwen2", "zero2-lora"])
def test_a_wrong_weight_is_detected(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The wrong weight is in the embedding of a token that the compared text does not contain."""
    vocab = read_result(runs / name / "manifest.json")["vocab"]
    seen = {7919 * i % vocab["size"] for i in range(128)} | {*vocab["adaptive"]}
    unseen = next(id for id in range(vocab["size"]) if id not in seen)

    def wrong(config: Any, weights: Any, out: Path, **settings: Any) -> None:
        nearly = dict(weights)
        nearly["model.embed_tokens.weight"][unseen, 3] *= 1.01
        write_weights(config, nearly, out, **settings)

    monkeypatch.setattr("train.export.weights.write_weights", wrong)
    message = refused(runs / name, tmp_path / "model", FLOAT32)
    assert "verify: model.embed_tokens.weight must equal the training's" in message


def test_the_compared_ids_fit_the_context() -> None:
    """Bug: the export of a model with learned positions and a context of 128 was an IndexError."""
    small, large = (GPT2Config(n_positions=size) for size in (128, 1024))
    assert len(compared_ids(small, 50, [50, 51])) == 128
    ids = compared_ids(large, 50, [50, 51])
    assert len(ids) == 130 and ids[-2:] == [50, 51] and max(ids[:-2]) < 50


def test_another_rope_is_detected(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits differ although all weights are equal."""

    def wrong(config: dict[str, Any], **_: Any) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 15000.0}
        return {**config, "rope_parameters": rope}

    monkeypatch.setattr("train.export.sidecars.served_config", wrong)
    message = refused(runs / "zero1-qwen2", tmp_path / "model")
    assert "verify: logits must equal the training's within 0," in message


@pytest.mark.parametrize(
    ("file", "changed", "message"),
    [
        ("model/tokenizer.json", {"truncation": {}}, "the tokenizer of the training"),
        ("model/config.json", {"num_hidden_layers": 1}, "the architecture of the"),
        (TABLE, None, f"{TABLE} must be an intact n-gram table"),
        ("checkpoints/*/*rank_1*optim_states.pt", None, "optim_states.pt has"),
    ],
    ids=["tokenizer", "architecture", "table", "weights"],
)
def test_a_damaged_training_is_refused(
    runs: Path, tmp_path: Path, file: str, changed: dict[str, Any] | None, message: str
) -> None:
    run = Path(shutil.copytree(runs / "zero3", tmp_path / "run"))
    (damaged,) = run.glob(file)
    if changed:
        change(damaged, **changed)
    else:
        damaged.write_bytes(damaged.read_bytes()[:-7])
    assert message in refused(run, tmp_path / "model")


def test_a_model_that_would_not_decode_is_refused(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a DeepSeek-V2 was exported as verified, but `infer` refused the directory."""
    monkeypatch.setattr(
        "train.export.trained.why_unsupported", lambda config: "which is too new"
    )
    message = refused(runs / "zero1-qwen2", tmp_path / "model")
    assert "a model that can be decoded, got qwen2, which is too new" in message


def test_a_gated_adapter_is_kept_and_cannot_be_merged() -> None:
    gated = LoraSettings(rank=4, gated=True)
    assert keeps_adapter(ExportConfig("c", "o"), gated)
    assert not keeps_adapter(ExportConfig("c", "o"), LoraSettings(rank=4))
    with pytest.raises(UserError, match="lora=merged must suit the adapter of c"):
        keeps_adapter(ExportConfig("c", "o", lora="merged"), gated)


def test_a_training_of_no_steps_writes_the_mean_of_adapters(
    runs: Path, data_folder: Path, tmp_path: Path
) -> None:
    """model.mean_with: a run validates the mean and saves it, for an export or more steps."""
    first = export(runs / "zero3-gated", tmp_path / "first", FLOAT32) / "adapter"
    second = shutil.copytree(first, tmp_path / "second")
    weights = load_file(first / WEIGHTS)
    save_file({name: 2 * value for name, value in weights.items()}, second / WEIGHTS)
    settings = [*RECIPE, *RUNS["zero3-gated"], f"data.path={data_folder}"]
    settings += [f"model.adapter={first}", f"model.mean_with=[{second}]"]
    training = ["train", *settings, f"out={tmp_path / 'mean'}", "global_batch=4"]
    done = warm.run_ranks(*training, "steps=0")
    assert done.returncode == 0, done.stdout + done.stderr
    out = export(tmp_path / "mean", tmp_path / "model", FLOAT32)
    for name, mean in load_file(out / "adapter" / WEIGHTS).items():
        assert torch.equal(mean, (1.5 * weights[name].bfloat16().float()).bfloat16())
    assert "nothing to do" in warm.run_ranks(*training, "steps=0").stdout
