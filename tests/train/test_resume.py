"""Runs that are interrupted, on two ranks and one: see resume_worker.py for what they
do.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from conf import settings
from tests import warm
from tests.train.resume_worker import RECIPE, SAVE_EVERY, STEPS, VARIANTS
from train.config import TrainConfig
from train.trainer import learning_rate

ROOT = Path(__file__).parents[2]


def worker(cases: str, folder: Path, data: Path, *, ranks: int) -> str:
    run = warm.run_ranks("tests.train.resume_worker", cases, folder, data, ranks=ranks)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def runs(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of every run of two ranks; `reported` is what they printed."""
    folder = tmp_path_factory.mktemp("runs")
    message = worker(
        "whole_and_resumed,broken,failing,stopped,longer",
        folder,
        data_folder,
        ranks=2,
    )
    (folder / "told").write_text(message)
    return folder


def values(run: Path, name: str) -> list[float]:
    """Of every step, in full."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row[name] for row in rows]


def losses(run: Path) -> list[float]:
    return values(run, "loss")


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def message(runs: Path, run: str) -> str:
    """What each of both ranks said, which is the same."""
    first, second = ((runs / f"{run}.reported.{rank}").read_text() for rank in range(2))
    assert first.replace("rank 0", "rank 1") == second
    return first


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_repeats_every_loss_to_the_bit(runs: Path, variant: str) -> None:
    whole, resumed = losses(runs / variant), losses(runs / f"{variant}-resumed")
    assert len(whole) == STEPS and resumed == whole
    manifests = [
        json.loads((runs / n / "manifest.json").read_text())
        for n in (variant, f"{variant}-resumed")
    ]
    assert manifests[0]["validation"] == manifests[1]["validation"]


def test_zero_stages_agree(runs: Path) -> None:
    """Stage 0 in float32 reported a gradient norm of 0: PyTorch's own optimizer keeps
    none.
    """
    reference = losses(runs / "zero0")
    for stage in (1, 2, 3):
        assert losses(runs / f"zero{stage}") == pytest.approx(
            reference, rel=0, abs=1e-5
        )
    norms = [values(runs / f"zero{stage}", "gradient_norm") for stage in range(4)]
    assert all(row == pytest.approx(norms[0], rel=1e-4) for row in norms), (
        "stage 0 reported none"
    )


def test_own_text_teaches_no_standard_tokens(runs: Path) -> None:
    """Of 8 sequences 3 are own: 5 have a standard term, and the epoch is that of
    data.path.
    """
    whole, own = (values(runs / name, "epoch") for name in ("zero1", "own"))
    assert own == pytest.approx([5 / 8 * epoch for epoch in whole])
    assert losses(runs / "own") != losses(runs / "zero1")


def test_one_rank_goes_on_with_what_two_began(runs: Path, data_folder: Path) -> None:
    """From a universal checkpoint ZeRO 3 took the first group's weight decay for all,
    and counted Adam's steps once for every group of parameters: losses were off by 3e-4
    after one step.
    """
    worker("other_ranks", runs, data_folder, ranks=1)
    for variant in ("zero0", "zero1", "zero3", "own"):
        assert losses(runs / f"{variant}-other") == pytest.approx(
            losses(runs / variant), rel=0, abs=1e-6
        )
        assert all(
            name.startswith("step-") for name in checkpoints(runs / f"{variant}-other")
        )


def test_a_broken_checkpoint_is_reported_and_the_one_before_taken(runs: Path) -> None:
    why = "zero_pp_rank_1_mp_rank_00_optim_states.pt has a checksum mismatch: the file is corrupt"
    lines = [
        line for line in (runs / "told").read_text().splitlines() if "/flipped/" in line
    ]
    assert len(lines) == 1 and f"step-000008 is broken ({why}" in lines[0]
    assert lines[0].endswith("step-000004 is used")
    assert losses(runs / "flipped") == losses(runs / "zero2")
    assert checkpoints(runs / "flipped") == [
        "step-000004",
        "step-000008",
        "step-000012",
    ]


def test_a_full_disk_leaves_the_checkpoints_that_were(runs: Path) -> None:
    """One rank's writing fails: the other waited for it at DeepSpeed's barrier."""
    assert message(runs, "full").endswith(
        "the checkpoint of step 8 cannot be written: disk full (No space left on device). "
        "Earlier checkpoints stay: ['step-000004']."
    )
    assert checkpoints(runs / "full") == ["step-000004"]
    assert losses(runs / "full-resumed") == losses(runs / "zero2")


def test_a_diverged_run_stops_with_diagnostics(runs: Path) -> None:
    assert "step 6: the loss is nan. See" in message(runs, "nan")
    assert checkpoints(runs / "nan") == ["step-000004"]
    result = json.loads((runs / "nan" / "diagnostics.json").read_text())
    assert result["step"] == 6 and len(result["recent_losses"]) == 5
    ranks = result["micro_batches_by_rank"]
    assert [len(rows) for rows in ranks] == [2, 2]
    assert all(len(row["sequences"]) == 2 for rows in ranks for row in rows)
    bad = [row["loss"] != row["loss"] for rows in ranks for row in rows]
    assert bad == [False, False, False, True]


def test_a_signal_to_one_rank_saves_and_stops_all(runs: Path) -> None:
    """It came amid the sixth step, which is given up: the last whole one is saved, and
    gone on from.
    """
    assert "stopped by a signal; step 5 is saved" in message(runs, "stopped")
    assert "step-000005" in checkpoints(runs / "stopped-before")
    assert losses(runs / "stopped") == losses(runs / "zero2")


def start(out: Path, data: Path) -> subprocess.Popen[str]:
    """A run by the user's own script, once it has passed two checkpoints and has not
    ended.
    """
    arguments = [
        *RECIPE,
        *VARIANTS["zero2"],
        f"data.path={data}",
        "steps=4000",
        f"out={out}",
    ]
    environment = os.environ | {"RANKS": "2", "OMP_NUM_THREADS": "1"}
    log = open(f"{out}.log", "w")  # noqa: SIM115
    run = subprocess.Popen(
        ["bash", "launch/train.sh", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=log,
        stderr=log,
        text=True,
    )
    steps, began = out / "log.jsonl", time.time()
    while (
        not written_since(began, steps)
        or len(steps.read_text().splitlines()) < 2 * SAVE_EVERY + 1
    ):
        assert run.poll() is None, Path(f"{out}.log").read_text()
        time.sleep(0.05)
    return run


def written_since(moment: float, path: Path) -> bool:
    return path.is_file() and path.stat().st_mtime > moment


def rank_process(out: Path, rank: int) -> int:
    """The process of a rank, found by its command line and environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            f"out={out}".encode() in arguments
            and f"RANK={rank}".encode() in environment
        ):
            return int(process.name)
    raise AssertionError(f"no rank {rank}")


@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="launch/train.sh wants .venv")
def test_a_killed_rank_ends_the_run_and_a_signal_ends_it_well(
    data_folder: Path, tmp_path: Path
) -> None:
    """kill -9 of one rank: the others end and it is named. Then the same command goes
    on from the last checkpoint, and ends with code 75 on SIGUSR1.
    """
    out = tmp_path / "run"
    run = start(out, data_folder)
    began = time.monotonic()
    os.kill(rank_process(out, 1), signal.SIGKILL)
    assert run.wait() not in (0, 75)
    assert time.monotonic() - began < 60
    printed = Path(f"{out}.log").read_text()
    assert "local_rank: 1" in printed and "exitcode  : -9" in printed
    before = checkpoints(out)
    run = start(out, data_folder)
    run.send_signal(signal.SIGUSR1)
    assert run.wait() == 75, Path(f"{out}.log").read_text()
    assert "stopped by a signal; step" in Path(f"{out}.log").read_text()
    assert (
        checkpoints(out)[-1] > [name for name in before if name.startswith("step-")][-1]
    )
    assert len(losses(out)) == int(checkpoints(out)[-1].removeprefix("step-"))


def test_a_run_goes_on_with_more_steps(runs: Path) -> None:
    """A finished run of 12 steps refused steps=16. The learning rate is the new
    length's from there on.
    """
    assert (
        losses(runs / "longer")[:STEPS] == losses(runs / "zero2")
        and len(losses(runs / "longer")) == STEPS + 4
    )
    optimizer = settings("train", TrainConfig, RECIPE).optimizer
    expected = [
        learning_rate(step, STEPS if step < STEPS else STEPS + 4, optimizer)
        for step in range(STEPS + 4)
    ]
    assert values(runs / "longer", "lr") == pytest.approx(expected)
    manifest = json.loads((runs / "longer" / "manifest.json").read_text())
    assert manifest["settings"]["steps"] == manifest["step"] == STEPS + 4
    assert f"at least the {STEPS + 4} steps that out=" in message(runs, "longer")
