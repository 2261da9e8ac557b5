"""What Weights & Biases gets of a model: its training and its report, as offline files have it."""

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.offline_runs import read_runs
from tests.train.resume_worker import RECIPE

TINY = [
    item
    for item in RECIPE
    if not item.startswith(("tracker", "steps", "save_every", "validate_every"))
]


def command(module: str, *arguments: str) -> None:
    done = warm.run([sys.executable, "-m", module, *arguments])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(
    data_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Of a training that was resumed, and a report that was made twice."""
    folder = tmp_path_factory.mktemp("tracking")
    tuned, model, report = (folder / name for name in ("tuned", "model", "report"))
    training = [*TINY, "steps=2", "save_every=1", "validate_every=1"]
    training += [f"data.path={data_folder}", f"out={tuned}"]
    command("train", *training)
    (tuned / "manifest.json").unlink()  # as if it had been killed in its second step
    shutil.rmtree(tuned / "checkpoints" / "step-000002")
    time.sleep(1)  # W&B names a run's offline folder by the second
    command("train", *training)
    export = [f"checkpoint={tuned}", f"out={model}"]
    command("train.export", *export)
    bench = ["prompts=[humaneval]", "count=1", "prompt_tokens=1000", "part=speed"]
    bench += ["speed.max_new_tokens=3", "speed.decoders=[ngrams]", "speed.peers=[]"]
    bench += ["speed.rounds=1", "dtype=float32"]
    for _ in range(2):  # the second finds all measured
        command("infer.bench", f"model={model}", f"out={report}", *bench)
    return read_runs(folder)


def of(runs: dict[str, dict[str, Any]], job: str) -> dict[str, Any]:
    (run,) = (run for run in runs.values() if run["job_type"] == job)
    return run


def test_each_has_one_run(runs: dict[str, dict[str, Any]]) -> None:
    """Each report made another run."""
    jobs = sorted(run["job_type"] for run in runs.values())
    assert jobs == ["report", "train"]


def test_a_training_is_drawn_over_tokens(runs: dict[str, dict[str, Any]]) -> None:
    run = of(runs, "train")
    assert run["metrics"]["*"]["step_metric"] == "tokens_seen"
    rows = [row["item"] for row in run["history"]]
    seen = [row["tokens_seen"] for row in rows if "train/loss" in row]
    assert seen == [8 * 128, 2 * 8 * 128, 2 * 8 * 128]  # the second step twice
    assert {"train/lr", "train/tokens_per_second", "train/accepted"} <= rows[1].keys()
    validations = [row for row in rows if "validation/standard_loss" in row]
    assert validations[0] is rows[0]


def test_a_report_has_its_figures(
    runs: dict[str, dict[str, Any]],
) -> None:
    summary = of(runs, "report")["summary"]
    assert summary["speed/humaneval/T0/plain/speedup"] == 1.0
    figures = {f"speed/humaneval/T{heat}/ngrams/speedup" for heat in (0, 1)}
    assert figures <= summary.keys()
