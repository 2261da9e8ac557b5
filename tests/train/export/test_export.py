"""Exports of what was trained under every ZeRO stage: see live_worker.py for what is alive then."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conf import UserError, settings
from conf.stage import staged
from data_prep.shards import Shards
from tests.train.export.live_worker import BFLOAT16, STAGES
from train.export.__main__ import main
from train.export.acceptance import announce, count_sequences
from train.export.checkpoint_weights import CheckpointWeights
from train.export.config import ExportConfig
from train.export.trained import open_trained
from train.export.weight_files import write_weights
from train.model.lora import PlainWeights
from train.objective.attention import register

ROOT = Path(__file__).parents[3]
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
    command = [sys.executable, *launch, "-m", "tests.train.export.live_worker", str(folder), str(data), *told]
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
    assert found["weights"] >= 12
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
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["validation"][-1]["masked_loss"] += 1
    (run / "manifest.json").write_text(json.dumps(manifest))
    told = refused(run, tmp_path / "model")
    assert "wanted masked_loss=" in told and "on 4 of its 4 held-out sequences with the model read back" in told
    manifest["validation"][-1]["step"] = 2
    monkeypatch.setattr("train.export.directory.export", None)  # is not reached
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "wanted a checkpoint that was validated, found that of step 3" in refused(run, tmp_path / "model")


def test_how_long_measuring_takes_is_said_before(runs: Path, data_folder: Path) -> None:
    """What was told to be a few minutes of a CPU were five hours of a 7B model."""
    trained, cpu = open_trained(str(runs / "zero1")), torch.device("cpu")
    shards = Shards(data_folder, "held_out")
    assert count_sequences(trained, shards, None, cpu) == (4, 4)
    assert announce(trained, shards, count=4, every=4, device=cpu).endswith("4 of 4 held-out sequences")
    trained.manifest["parameters"] = 7_000_000_000 * 128  # its sequences are 128 times as long
    told = announce(trained, shards, count=4, every=64, device=cpu)
    assert ": about 5.1 hours at 0.1 TFLOP/s on the cpu; verify_sequences=2" in told


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


def change(file: Path, **changed: Any) -> None:
    """Of a JSON object; None takes one out."""
    value = {**json.loads(file.read_text()), **changed}
    file.write_text(json.dumps({name: one for name, one in value.items() if one is not None}))


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
    config.write_text("no JSON")
    assert f"{config}: wanted JSON, found" in refused(run, out)
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
