"""Exports of what was trained under every ZeRO stage: see live_worker.py for what is alive then."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conf import UserError, settings
from conf.stage import staged
from tests.train.live_worker import BFLOAT16, STAGES
from train.attention import register
from train.export.__main__ import main
from train.export.config import ExportConfig
from train.export.shards import write_weights

ROOT = Path(__file__).parents[2]
TIED = "+model.shape.tie_word_embeddings=true"
LORA = ["objective=branch", "lora.rank=4"]
RUNS = {  # tests/drills/round_trip.py has all of them
    "zero0-bf16": [*STAGES["zero0"], BFLOAT16],
    "zero0-tied": [*STAGES["zero0"], BFLOAT16, TIED],
    "zero1": STAGES["zero1"],
    "zero2-tied": [*STAGES["zero2"], BFLOAT16, TIED],
    "zero3": STAGES["zero3"],
    "zero3-bf16": [*STAGES["zero3"], BFLOAT16],
    "zero2-lora": [*STAGES["zero2"], BFLOAT16, *LORA],
    "zero3-lora": [*STAGES["zero3"], *LORA],
    "zero3-gated": [*STAGES["zero3"], BFLOAT16, *LORA, "lora.gated=true"],
    "causal": [*STAGES["zero1"], "objective=causal", "objective.soft=0"],
}
PLAIN = [name for name in RUNS if "lora" not in name and "gated" not in name]
ADAPTED = [name for name in RUNS if name not in PLAIN]


def train(folder: Path, data: Path, runs: dict[str, list[str]], *, ranks: int) -> Path:
    """The worker's folders."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    told = [f"{name}={','.join(overrides)}" for name, overrides in runs.items()]
    command = [sys.executable, *launch, "-m", "tests.train.live_worker", str(folder), str(data), *told]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture(scope="module")
def runs(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run, on two ranks."""
    return train(tmp_path_factory.mktemp("runs"), data_folder, RUNS, ranks=2)


def export(checkpoint: Path, out: Path, *overrides: str) -> Path:
    main(settings("export", ExportConfig, [f"checkpoint={checkpoint}", f"out={out}", *overrides]))
    return out


def logits(model: Path, ids: torch.Tensor) -> torch.Tensor:
    """By Transformers' own reading of the directory, with the kernel of the training."""
    lm = AutoModelForCausalLM.from_pretrained(model, attn_implementation=register("eager"))
    with torch.no_grad():
        return lm.eval()(input_ids=ids, use_cache=False).logits


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
    found = json.loads((out / "manifest.json").read_text())["verified"]
    assert found["positions"] == 128 and found["agreement"] > 0.9 and found["sequences"] == 4
    assert (found["logit_difference"] == 0) == (name != "zero3-lora")
    assert found["validation"].keys() == found["measured"].keys() >= found["intervals"].keys()
    assert found["measured"].get("masked") == found["validation"].get("masked")
    for metric in found["measured"].keys() & {"standard_loss", "masked_loss"}:
        assert found["measured"][metric] == pytest.approx(found["validation"][metric], rel=2e-3)
    assert ("accepted" in found["intervals"]) == (name != "causal")


def copy_of(run: Path, out: Path) -> Path:
    """A training folder to spoil."""
    return Path(shutil.copytree(run, out))


def refused(run: Path, out: Path, *overrides: str) -> str:
    """The one sentence that an export ends with, having written nothing."""
    with pytest.raises(UserError) as error:
        export(run, out, *overrides)
    assert not out.exists() and "\n" not in str(error.value)
    return str(error.value)


def test_a_weight_that_was_written_wrong_is_found(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(config: Any, weights: Any, out: Path, **settings: Any) -> None:
        nearly = dict(weights)
        nearly["model.norm.weight"][3] *= 1.01
        write_weights(config, nearly, out, **settings)

    monkeypatch.setattr("train.export.__main__.write_weights", wrong)
    told = refused(runs / "zero1", tmp_path / "model")
    assert told.startswith("verify: wanted the training's logits from the directory read back, within 0, found")


def test_a_model_that_learned_something_else_is_found(runs: Path, tmp_path: Path) -> None:
    run = copy_of(runs / "zero1", tmp_path / "run")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["validation"][-1]["masked_loss"] += 1
    (run / "manifest.json").write_text(json.dumps(manifest))
    told = refused(run, tmp_path / "model")
    assert "wanted masked_loss=" in told and "on 4 held-out sequences with the model read back" in told
    manifest["validation"][-1]["step"] = 2
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "wanted a checkpoint that was validated, found that of step 3" in refused(run, tmp_path / "model")


def test_shards_that_moved_are_named_and_others_refused(runs: Path, data_folder: Path, tmp_path: Path) -> None:
    run = copy_of(runs / "zero1", tmp_path / "run")
    manifest = json.loads((run / "manifest.json").read_text())
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


def test_checkpoints_that_cannot_be_exported_are_one_sentence(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert "found no such folder" in refused(tmp_path / "absent", out)
    run = copy_of(runs / "zero3", tmp_path / "run")
    (run / "manifest.json").rename(run / "aside.json")
    assert refused(run, out).endswith(
        "wanted a finished folder of kind 'checkpoint', found no manifest.json in it"
    )
    (run / "aside.json").rename(run / "manifest.json")
    share = next(run.glob("checkpoints/*/*rank_1*optim_states.pt"))
    content = share.read_bytes()
    share.write_bytes(content[:-7])
    assert f"found none (step-000003: {share.name} has" in refused(run, out)
    share.unlink()
    assert f"found none (step-000003: {share.name}: No such file or directory)" in refused(run, out)
    shutil.rmtree(run / "checkpoints")
    assert "wanted a folder with checkpoints, found none" in refused(run, out)


def test_another_models_tokenizer_is_refused(runs: Path, tmp_path: Path) -> None:
    run = copy_of(runs / "zero1", tmp_path / "run")
    path = run / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"].pop()
    path.write_text(json.dumps(tokenizer))
    assert "wanted the tokenizer that was trained with, of at most 400 pieces, found another" in refused(
        run, tmp_path / "model"
    )
    config = json.loads((run / "model" / "config.json").read_text())
    (run / "model" / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    assert "wanted a model of at least 400 embedding rows, found 300" in refused(run, tmp_path / "model")
    (run / "model" / "config.json").unlink()
    assert "wanted the model's config.json in" in refused(run, tmp_path / "model")


def test_an_output_folder_in_use_is_left_alone(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    with staged(out), pytest.raises(UserError, match=r"out=.*: another run is writing it"):
        export(runs / "zero1", out)
    (out / "mine").write_text("mine")
    with pytest.raises(UserError, match="wanted a new or empty folder, found other files there"):
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
