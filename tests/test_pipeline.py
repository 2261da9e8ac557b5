"""Test all commands end to end on a model too small to learn anything."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conf.runs.files import read_json
from infer.bench.names import PEER
from tests import bpe, warm
from tests.recipes import BRANCH, CAUSAL, FINE_TUNE

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
    """Run a module's command and return its output; with `cold` in a new interpreter."""
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
    """Return the folders of a base model, a fine-tuned model and a draft model, and their exports."""
    root = tmp_path_factory.mktemp("runs")
    names = ("base", "base_model", "tuned", "model", "draft_training", "draft")
    result = {name: root / name for name in names} | {"data": data_folder}

    def train(
        recipe_settings: list[str], out: str, *settings: str, ranks: int = 1
    ) -> None:
        recipe = [*recipe_settings, f"data.path={data_folder}"]
        folder = f"out={result[out]}"
        command("train", *recipe, folder, *settings, *SHORT, *BATCH, ranks=ranks)

    def export(checkpoint: str, out: str, *settings: str, cold: bool = False) -> None:
        paths = [f"checkpoint={result[checkpoint]}", f"out={result[out]}"]
        command("train.export", *paths, *settings, QUIET, cold=cold)

    train(CAUSAL, "base", *TINY, ranks=2)
    export("base", "base_model")
    train(FINE_TUNE, "tuned", f"model.path={result['base_model']}", ranks=2)
    export("tuned", "model", "dtype=float32")
    train(["model=tiny", *BRANCH], "draft_training", *TINY)
    export("draft_training", "draft", "dtype=float32", cold=True)
    return result


def read(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name)


def test_a_model_is_trained_on_its_own_text(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """The base model continues documents; they are prepared and mixed into the training data."""
    text, own, tuned = (tmp_path / name for name in ("text", "own", "tuned"))
    data, model = folders["data"], folders["base_model"]
    sizes = ["documents=40", "prefix_min=4", "max_new_tokens=60", "batch=8"]
    source = [f"model={model}", f"data.path={data}", "dtype=float32", *sizes]
    command("infer.regenerate", *source, f"out={text}", ranks=2)
    vocab = [bpe.ADAPTIVE, f"tokenizer={data / 'tokenizer'}", "seq_len=128"]
    data_prep = ["experiment=own", f"data.path={text}", "workers=1", f"out={own}"]
    command("data_prep", *data_prep, *vocab)
    recipe = [*FINE_TUNE, f"data.path={data}", f"model.path={model}"]
    recipe += [f"data.own={own}", f"out={tuned}"]
    command("train", *recipe, *SHORT, *BATCH)
    trained_on = read(tuned, "manifest.json")["data"]["own"]
    assert trained_on["share"] == 0.25 and trained_on["documents"] > 5


def test_a_training_keeps_its_validations_and_last_checkpoints(
    folders: dict[str, Path],
) -> None:
    tuned = folders["tuned"]
    manifest = read(tuned, "manifest.json")
    assert [row["step"] for row in manifest["validation"]] == [0, 2, 4]
    accuracies = {f"accuracy_{j}" for j in range(1, manifest["L"] + 1)}
    assert accuracies <= manifest["validation"][0].keys()
    remaining = sorted(path.name for path in (tuned / "checkpoints").iterdir())
    assert remaining == ["step-000002", "step-000004"]


def test_evaluation_writes_one_report_of_speed_and_quality(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    held_out = folders["data"] / "held_out.jsonl"
    settings = [
        "tracker.mode=disabled",
        "experiment=demo",
        "part=null",
        f"draft={folders['draft']}",
        f"prompts=[{held_out}]",
        "count=2",
        "speed.max_new_tokens=12",
        "speed.temperatures=[0]",
        "speed.rounds=1",
        "speed.k=[2]",
        "speed.decoders=[hybrid,sdsat,ssd,gsd]",
        "speed.peers=[assisted]",
        f"quality.lines={held_out}",
        "quality.max_new_tokens=8",
        "quality.problems=2",
        "quality.unjudged=false",
    ]
    model, base = folders["model"], folders["base_model"]
    printed = evaluate(model, base, "out=report", *settings, ranks=2, cwd=tmp_path)
    out = tmp_path / "report"
    report = read(out, "report.json")
    decoders = {row["decoder"] for row in report["speed"]["rows"]}
    assert {"plain", "sdsat k=2", "hybrid", "ssd", "gsd", "base, plain"} <= decoders
    rows = report["speed"]["rows"] + report["quality"]["rows"]
    own = [row for row in rows if not row["decoder"].startswith(PEER)]
    assert len(own) < len(rows)
    # Transformers' decoders round otherwise, and differ at near-ties.
    assert all(row["same"] == row["compared"] for row in own)
    assert "hf assisted" in printed and "humaneval" in printed
    assert (out / "index.html").is_file()
    again = [f"model={model}", f"base={base}", f"out={out}", *settings]
    assert command("infer.bench", *again).count("nothing to do") == 2


def evaluate(*arguments: object, cwd: Path, ranks: int) -> str:
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


def test_a_finished_stage_is_skipped_and_other_settings_are_refused(
    folders: dict[str, Path],
) -> None:
    again = ["train", *FINE_TUNE, f"data.path={folders['data']}"]
    again += [f"model.path={folders['base_model']}", f"out={folders['tuned']}"]
    again += [*SHORT, *BATCH]
    assert "nothing to do" in command(*again)
    assert "seed=0; requested seed=1" in command(*again, "seed=1", code=2)
    assert "steps must be at least the 4 steps" in command(*again, "steps=3", code=2)
