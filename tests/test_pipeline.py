"""End to end by the users' own commands, on a model so small that it learns nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.train.export.readers import tensorrt_mask_id, vllm_mask_id

ROOT = Path(__file__).parents[1]
TINY = [
    "model.shape.hidden_size=32",
    "model.shape.intermediate_size=48",
    "model.shape.num_hidden_layers=1",
    "model.shape.num_attention_heads=2",
    "model.shape.num_key_value_heads=2",
]
SHORT = [
    "steps=4",
    "save_every=2",
    "validate_every=2",
    "validate_sequences=4",
    "optimizer.warmup_steps=1",
]
QUIET = "tracker.mode=disabled"
BATCH = ["global_batch=4", "micro_batch=2", QUIET]


def command(
    module: str, *arguments: object, ranks: int = 1, code: int = 0, cold: bool = False
) -> str:
    """Run a module as a user does, in a new interpreter if `cold`; return its output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "0"}
    if cold:
        line = [sys.executable, "-m", module, *map(str, arguments)]
        run = subprocess.run(
            line, capture_output=True, text=True, cwd=ROOT, env=environment
        )
    else:
        run = warm.run_ranks(module, *arguments, ranks=ranks, env=environment)
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout + run.stderr


@pytest.fixture(scope="module")
def folders(
    data_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Base, its export, tuned, the final model, and a draft model, each made by its command."""
    root = tmp_path_factory.mktemp("runs")
    names = ("base", "base_model", "tuned", "model", "draft_training", "draft")
    result = {name: root / name for name in names} | {"data": data_folder}

    def train(experiment: str, out: str, *settings: str, ranks: int = 1) -> None:
        recipe = [f"experiment={experiment}", f"data.path={data_folder}"]
        place = f"out={result[out]}"
        command("train", *recipe, place, *settings, *SHORT, *BATCH, ranks=ranks)

    def export(checkpoint: str, out: str, *settings: str, cold: bool = False) -> None:
        places = [f"checkpoint={result[checkpoint]}", f"out={result[out]}"]
        command("train.export", *places, *settings, QUIET, cold=cold)

    train("demo_base", "base", *TINY, ranks=2)
    export("base", "base_model")
    train("demo", "tuned", f"model.path={result['base_model']}", ranks=2)
    export("tuned", "model", "dtype=float32")
    train("demo_draft", "draft_training", *TINY)
    export("draft_training", "draft", "dtype=float32", cold=True)
    return result


def test_a_model_is_trained_on_its_own_text(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Documents continued by the base model are prepared and mixed in for the drafts."""
    text = tmp_path / "text"
    own = tmp_path / "own"
    tuned = tmp_path / "tuned"
    data = f"data.path={folders['data']}"
    model = folders["base_model"]
    sizes = ["documents=40", "prefix_min=4", "decode.max_new_tokens=60", "batch=8"]
    source = [f"model={model}", data, "dtype=float32", *sizes]
    command("infer.regenerate", *source, f"out={text}", ranks=2)
    vocab = ["vocab=demo", f"tokenizer={folders['data'] / 'tokenizer'}", "seq_len=128"]
    made = ["experiment=own", f"data.path={text}", "workers=1", f"out={own}"]
    command("data_prep", *made, *vocab)
    recipe = ["experiment=demo", data, f"model.path={model}", f"data.own={own}"]
    command("train", *recipe, f"out={tuned}", *SHORT, *BATCH)
    manifest = json.loads((tuned / "manifest.json").read_text())
    assert manifest["data"]["own"]["share"] == 0.25
    assert manifest["data"]["own"]["documents"] > 5


def test_training_leaves_validations_and_the_last_checkpoints(
    folders: dict[str, Path],
) -> None:
    manifest = json.loads((folders["tuned"] / "manifest.json").read_text())
    assert [row["step"] for row in manifest["validation"]] == [0, 2, 4]
    assert all(
        f"accuracy_{j}" in manifest["validation"][0]
        for j in range(1, manifest["L"] + 1)
    )
    remaining = sorted(p.name for p in (folders["tuned"] / "checkpoints").iterdir())
    assert remaining == ["step-000002", "step-000004"]


def test_the_export_is_a_plain_directory_that_says_what_made_it(
    folders: dict[str, Path],
) -> None:
    model = folders["model"]
    adaptive = json.loads((model / "adaptive.json").read_text())
    config = json.loads((model / "config.json").read_text())
    vocab = json.loads((folders["data"] / "manifest.json").read_text())["vocab"]
    assert adaptive["adaptive_ids"] == vocab["adaptive"][:1] and adaptive["identical"]
    assert adaptive["bos"] == vocab["bos"] and set(vocab["adaptive"]) < set(
        adaptive["control"]
    )
    assert vllm_mask_id(config) == tensorrt_mask_id(config) == vocab["adaptive"][0]
    assert config["vocab_size"] == vocab["size"]
    generation = json.loads((model / "generation_config.json").read_text())
    assert config["eos_token_id"] == generation["eos_token_id"] == vocab["eos"]
    assert (model / "generation_config.json").is_file() and (
        model / "tokenizer.json"
    ).is_file()
    assert not (folders["base_model"] / "adaptive.json").exists()
    weights = load_file(model / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_a_draft_model_has_the_tokens_of_its_target(folders: dict[str, Path]) -> None:
    draft, model = folders["draft"], folders["model"]
    ours, theirs = (
        json.loads((folder / "adaptive.json").read_text()) for folder in (draft, model)
    )
    assert ours.pop("provenance") != theirs.pop("provenance") and ours == theirs
    assert (draft / "tokenizer.json").read_bytes() == (
        model / "tokenizer.json"
    ).read_bytes()


def test_evaluation_makes_one_report_of_speed_and_quality(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    held_out = folders["data"] / "held_out.jsonl"
    arguments = [
        folders["model"],
        folders["base_model"],
        "out=report",
        "tracker.mode=disabled",
        "experiment=demo",
        f"draft={folders['draft']}",
        f"prompts=[{held_out}]",
        "count=2",
        "speed.max_new_tokens=12",
        "speed.temperatures=[0]",
        "speed.rounds=1",
        "speed.k=[2]",
        "speed.peers=[assisted]",
        f"quality.lines={held_out}",
        "quality.max_new_tokens=8",
        "quality.problems=2",
    ]
    printed = evaluate(*arguments, ranks=2, cwd=tmp_path)
    out = tmp_path / "report"
    report = json.loads((out / "report.json").read_text())
    decoders = {row["decoder"] for row in report["speed"]["rows"]}
    assert {"plain", "sdsat k=2", "hybrid", "ssd", "gsd", "base, plain"} <= decoders
    rows = report["speed"]["rows"] + report["quality"]["rows"]
    assert all(row["same"] == row["compared"] for row in rows)
    assert "hf assisted" in printed and "humaneval" in printed
    assert (out / "index.html").is_file() and (out / "acceptance.csv").is_file()
    assert evaluate(*arguments, cwd=tmp_path).count("nothing to do") == 2


def evaluate(*arguments: object, cwd: Path, ranks: int = 1) -> str:
    """Run launch/evaluate.sh in the folder `cwd`; return its output."""
    run = subprocess.run(
        ["bash", str(ROOT / "launch" / "evaluate.sh"), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RANKS": str(ranks)},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_a_finished_stage_is_skipped_and_another_is_refused(
    folders: dict[str, Path],
) -> None:
    recipe = [
        f"data.path={folders['data']}",
        f"model.path={folders['base_model']}",
        f"out={folders['tuned']}",
    ]
    again = ["train", "experiment=demo", *recipe, *SHORT, *BATCH]
    assert "nothing to do" in command(*again)
    assert "seed=0; requested seed=1" in command(*again, "seed=1", code=2)
    assert "steps=3 must be at least the 4 steps" in command(*again, "steps=3", code=2)
    export = [f"checkpoint={folders['tuned']}", f"out={folders['model']}"]
    assert "nothing to do" in command("train.export", *export, "dtype=float32")
    assert "dtype=float32; requested dtype=bfloat16" in command(
        "train.export", *export, code=2
    )


def test_an_interrupted_run_ends_as_if_it_had_not_been(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """A run that is killed after its first checkpoint."""
    recipe = [
        "experiment=demo_base",
        f"data.path={folders['data']}",
        *TINY,
        *SHORT,
        *BATCH,
    ]
    out = tmp_path / "base"
    killed = "import train.trainer as loop, runpy; save = loop.Trainer._save\n" + (
        "def once(self): save(self); import os; os._exit(9)\n"
        "loop.Trainer._save = once; runpy.run_module('train', run_name='__main__')"
    )
    run = subprocess.run(
        [sys.executable, "-c", killed, *recipe, f"out={out}"],
        cwd=ROOT,
        capture_output=True,
    )
    assert run.returncode == 9 and [
        p.name for p in (out / "checkpoints").iterdir()
    ] == ["step-000002"]
    assert not (out / "manifest.json").exists()
    whole = tmp_path / "whole"
    command("train", *recipe, f"out={out}")
    command("train", *recipe, f"out={whole}")
    result = [
        json.loads((p / "manifest.json").read_text())["validation"]
        for p in (out, whole)
    ]
    assert result[0] == result[1]


def test_infer_completes_a_prompt(folders: dict[str, Path]) -> None:
    arguments = [
        "infer",
        f"model={folders['model']}",
        "prompt=def f(x):",
        "decode.max_new_tokens=12",
    ]
    plain = command(*arguments, "decode=plain", "dtype=float32", cold=True)
    drafted = command(
        *arguments, "decode=hybrid", "decode.k=4", "decode.probes=root", "dtype=float32"
    )
    assert plain.rstrip().rsplit("\n", 1)[0] == drafted.rstrip().rsplit("\n", 1)[0]
    assert "tokens per forward" in drafted
