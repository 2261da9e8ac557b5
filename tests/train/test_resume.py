"""Test interrupted and resumed runs on two ranks and on one; resume_worker.py has the runs."""

import math
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from conf.runs.files import read_json
from conf.settings.compose import settings
from conf.text.rows import read_rows
from tests import warm
from tests.train.resume_worker import OTHER_RANKS, RECIPE, SAVE_EVERY, STEPS, VARIANTS
from train.config import TrainConfig
from train.schedule import Clock, Schedule, learning_rate
from train.tensor_files import load_mapped

ROOT = Path(__file__).parents[2]
CASES = (
    "whole_and_resumed,broken,full,diverged,stopped,longer,planned,unrecorded,"
    "early,late,unfinished,foreign,basic"
)


def worker(cases: str, folder: Path, data: Path, *, ranks: int) -> str:
    run = warm.run_ranks("tests.train.resume_worker", cases, folder, data, ranks=ranks)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def runs(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all cases on two ranks; return the folder of the runs, with their output in `printed`."""
    folder = tmp_path_factory.mktemp("runs")
    printed = worker(CASES, folder, data_folder, ranks=2)
    (folder / "printed").write_text(printed)
    return folder


def values(run: Path, name: str = "loss") -> list[float]:
    """Return a metric of every step."""
    rows = read_rows(run / "log.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row[name] for row in rows]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def message(runs: Path, run: str) -> str:
    """Return the message that both ranks reported; it must be the same."""
    first, second = ((runs / f"{run}.reported.{rank}").read_text() for rank in range(2))
    assert first == second
    return first


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_has_the_same_losses_bit_for_bit(
    runs: Path, variant: str
) -> None:
    whole, resumed = runs / variant, runs / f"{variant}-resumed"
    assert len(values(whole)) == STEPS and values(resumed) == values(whole)
    first, second = (
        read_json(run / "manifest.json")["validation"] for run in (whole, resumed)
    )
    assert first == second


@pytest.mark.parametrize("variant", ["gated", "tied"])
def test_checkpoints_share_one_copy_of_the_frozen_weights(
    runs: Path, variant: str
) -> None:
    """Each checkpoint of an adapter had the whole base model: 2.5 GB for 0.5B parameters."""
    run = runs / variant
    assert sorted(path.name for path in (run / "frozen").iterdir()) == [
        "frozen-00000.pt",
        "frozen.json",
    ]
    frozen = load_mapped(run / "frozen" / "frozen-00000.pt")
    assert any(".q_proj.base_layer." in name for name in frozen)
    assert not any("lora_" in name for name in frozen)
    for folder in (run / "checkpoints").iterdir():
        for path in folder.glob("*model_states.pt"):
            state = load_mapped(path)
            assert not frozen.keys() & state["module"].keys()
            assert state["frozen_param_fragments"] is None


def test_a_run_of_minutes_is_planned_once(runs: Path) -> None:
    """A run that resumes before its last checkpoint takes the number of steps planned before."""
    whole, resumed = runs / "planned", runs / "planned-resumed"
    plan = read_json(whole / "planned.json")
    assert plan["steps"] > plan["planned_at"] >= 3
    assert len(values(whole)) == plan["steps"] and values(resumed) == values(whole)
    optimizer = settings("train", TrainConfig, RECIPE).optimizer
    schedule = Schedule(plan["steps"], plan["planned_at"])
    rates = [learning_rate(step, schedule, optimizer) for step in range(plan["steps"])]
    assert values(whole, "lr") == pytest.approx(rates)
    assert rates[plan["planned_at"]] == pytest.approx(1e-2)
    # On a busy machine the plan may have a single step, which has both the peak and the last rate.
    assert rates[-1] < 1e-3 or plan["steps"] == plan["planned_at"] + 1
    assert read_json(resumed / "planned.json") == plan


def test_the_time_of_earlier_jobs_counts(runs: Path) -> None:
    """Bug: jobs shorter than the time of planning never planned the steps, and the run never ended."""

    def elapsed(run: str, step: int) -> float:
        folder = runs / run / "checkpoints" / f"step-{step:06d}"
        return read_json(folder / "checkpoint.json")["state"]["elapsed"]

    assert elapsed("zero1-resumed", STEPS) > elapsed("zero1", STEPS - SAVE_EVERY)
    assert Clock(before=60).elapsed() >= 60


def test_checkpoints_do_not_have_the_trackers_id(runs: Path) -> None:
    """Bug: after wandb/run.json was deleted, a training continued the run that this file had named."""
    (checkpoint, *_) = (runs / "zero1" / "checkpoints").glob("*/checkpoint.json")
    assert "run_id" not in read_json(checkpoint)["state"]


def test_zero_stages_agree(runs: Path) -> None:
    """Bug: stage 0 in float32 reported a gradient norm of 0."""
    reference = runs / "zero0"
    norms = pytest.approx(values(reference, "gradient_norm"), rel=1e-4)
    for stage in (1, 2, 3):
        run = runs / f"zero{stage}"
        assert values(run) == pytest.approx(values(reference), rel=0, abs=1e-5)
        assert values(run, "gradient_norm") == norms


def test_one_rank_continues_runs_of_two_ranks(runs: Path, data_folder: Path) -> None:
    """Bug: losses were off by 3e-4 after ZeRO 3 loaded a universal checkpoint.

    All groups got the first group's weight decay, and each group incremented Adam's shared
    step count.
    """
    worker("other_ranks", runs, data_folder, ranks=1)
    for variant in OTHER_RANKS:
        other = runs / f"{variant}-other"
        expected = pytest.approx(values(runs / variant), rel=0, abs=1e-6)
        assert values(other) == expected
        assert all(name.startswith("step-") for name in checkpoints(other))


def test_a_broken_checkpoint_is_reported_and_the_previous_one_loaded(
    runs: Path,
) -> None:
    printed = (runs / "printed").read_text().splitlines()
    (line,) = (line for line in printed if "/flipped/" in line)
    assert "step-000004 is broken (zero_pp_rank_1" in line
    assert "checksum mismatch" in line and line.endswith("continuing from step-000002")
    assert values(runs / "flipped") == values(runs / "zero2")


def test_a_full_disk_leaves_the_earlier_checkpoints(runs: Path) -> None:
    """Bug: if one rank failed to write, the other waited forever at DeepSpeed's barrier."""
    assert message(runs, "full").endswith(
        "the checkpoint of step 4 cannot be written: disk full (No space left on device). "
        "Earlier checkpoints stay: ['step-000002']."
    )
    assert values(runs / "full") == values(runs / "zero2")


def test_a_diverged_run_stops_with_diagnostics(runs: Path) -> None:
    assert "step 3: the loss is nan. See" in message(runs, "nan")
    assert checkpoints(runs / "nan") == ["step-000002"]
    assert "step 2 of" in (runs / "nan" / "index.html").read_text()
    result = read_json(runs / "nan" / "diagnostics.json")
    ranks = result["micro_batches_by_rank"]
    finite = [[math.isfinite(row["loss"]) for row in rows] for rows in ranks]
    assert finite == [[True, True], [True, False]]


def test_checkpoints_without_the_runs_settings_are_refused(runs: Path) -> None:
    """Bug: a model of another shape ended in a traceback of load_state_dict."""
    assert message(runs, "unrecorded").endswith(
        "must have run.json beside its checkpoints, got none: the settings of the run are "
        "not known. Restore it, or use another out."
    )


def test_a_signal_to_one_rank_saves_and_stops_all(runs: Path) -> None:
    """The fourth step is interrupted, and the third is saved."""
    assert "stopped by a signal; step 3 is saved" in message(runs, "stopped")
    assert values(runs / "stopped") == values(runs / "zero2")


def test_a_signal_before_the_first_validation_stops_the_run(runs: Path) -> None:
    """Bug: the page without a validation ended in a traceback, and the code was not 75."""
    for run in ("early", "validated"):
        assert message(runs, run).startswith("stopped by a signal; no step is saved")
    assert values(runs / "early") == values(runs / "zero0")


def test_a_longer_run_has_the_validation_that_a_signal_interrupted(runs: Path) -> None:
    """Bug: the checkpoint did not have it, so the page of a longer run lacked the point."""
    rows = read_json(runs / "late" / "manifest.json")["validation"]
    assert [row["step"] for row in rows] == [0, 3, 4, 5]


@pytest.mark.parametrize("run", ["validated", "unfinished"])
def test_an_interrupted_run_of_no_steps_is_finished(runs: Path, run: str) -> None:
    """Bug: step 0 was saved again, and its rename failed: "Directory not empty"."""
    assert checkpoints(runs / run) == ["step-000000"]
    (row,) = read_json(runs / run / "manifest.json")["validation"]
    assert row["step"] == 0


def test_a_folder_of_another_program_is_refused(runs: Path) -> None:
    """Bug: the training emptied its log.jsonl, and took its model/ for the run's architecture."""
    assert "must be a new or empty folder" in message(runs, "foreign")
    (file,) = (runs / "foreign").iterdir()
    assert file.read_text() == "{}"
    assert (runs / "killed" / "manifest.json").is_file()


def test_the_baseline_has_no_masked_mean(runs: Path) -> None:
    """Bug: objective.masked_mean=masked scaled the baseline's adaptive positions by their number."""
    assert values(runs / "basic-masked") == values(runs / "basic-n")


def steps_taken(out: Path) -> int:
    log = out / "log.jsonl"
    return len(log.read_text().splitlines()) if log.is_file() else 0


def start(out: Path, data: Path) -> subprocess.Popen[bytes]:
    """Start a run with launch/train.sh; return when it has saved two more checkpoints."""
    arguments = [*RECIPE, *VARIANTS["zero2"], f"data.path={data}", f"out={out}"]
    last = steps_taken(out) + 2 * SAVE_EVERY
    with open(f"{out}.log", "w") as log:
        run = subprocess.Popen(
            ["bash", "launch/train.sh", *arguments, "steps=4000"],
            cwd=ROOT,
            env=os.environ | {"RANKS": "2", "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    while steps_taken(out) <= last:
        assert run.poll() is None, Path(f"{out}.log").read_text()
        time.sleep(0.05)
    return run


@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="launch/train.sh needs .venv")
def test_a_killed_rank_ends_the_run_and_a_signal_saves_it(
    data_folder: Path, tmp_path: Path
) -> None:
    """After kill -9 of one rank all ranks end, and the log names the killed one.

    The same command continues from the last checkpoint. On SIGUSR1 it ends with code 75.
    """
    out, log = tmp_path / "run", tmp_path / "run.log"
    run = start(out, data_folder)
    processes = psutil.Process(run.pid).children(recursive=True)
    next(p for p in processes if p.environ().get("RANK") == "1").kill()
    assert run.wait(timeout=60) not in (0, 75)
    assert "local_rank: 1" in log.read_text() and "exitcode  : -9" in log.read_text()
    run = start(out, data_folder)
    run.send_signal(signal.SIGUSR1)
    assert run.wait() == 75, log.read_text()
    assert f"stopped by a signal; step {steps_taken(out)} is saved" in log.read_text()
    assert checkpoints(out)[-1] == f"step-{steps_taken(out):06d}"


def test_a_finished_run_continues_with_more_steps(runs: Path) -> None:
    """From there on the learning rate follows the new number of steps."""
    longer, end = runs / "longer", STEPS + 4
    assert values(longer)[:STEPS] == values(runs / "zero2")
    optimizer = settings("train", TrainConfig, RECIPE).optimizer
    before, after = Schedule(STEPS), Schedule(end)
    rates = [learning_rate(step, before, optimizer) for step in range(STEPS)]
    rates += [learning_rate(step, after, optimizer) for step in range(STEPS, end)]
    assert values(longer, "lr") == pytest.approx(rates)
    assert f"at least the {end} steps that out=" in message(runs, "longer")
