"""-m: which jobs a command line makes, and that they run."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conf import UserError
from conf.cli import jobs_of, sweep
from infer.speed import SpeedConfig
from train.config import TrainConfig

ROOT = Path(__file__).parents[2]
SPEED = ["model=m", "out=${seed}"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["seed=0,1"], [["seed=0"], ["seed=1"]]),
        (["seed=range(1,4)"], [["seed=1"], ["seed=2"], ["seed=3"]]),
        (["seed=0,1", "rounds=2,3"], [[a, b] for a in ("seed=0", "seed=1") for b in ("rounds=2", "rounds=3")]),
        (["model=a/b,'c d'"], [["model=a/b"], ["model=c d"]]),
        (["model='a,b'"], [["model=a,b"]]),
        (["model=a (b, c"], [["model=a (b, c"]]),
        (["k=1,3"], [["k=1,3"]]),  # a list is one value, as without -m
        (["k=[1],[3,5]"], [["k=[1]"], ["k=[3,5]"]]),
        (["prompts=humaneval,mbpp"], [["prompts=humaneval,mbpp"]]),
        (["out=runs/${seed}"], [["out=runs/${seed}"]]),
    ],
)
def test_commas_make_jobs(given: list[str], expected: list[list[str]]) -> None:
    assert [list(job) for job in jobs_of("speed", SpeedConfig, given)] == expected


def test_a_choice_of_a_group_is_swept() -> None:
    jobs = jobs_of("train", TrainConfig, ["objective=dual,branch", "objective.draft_loss=ce,tv"])
    assert [job[0] for job in jobs] == ["objective=dual"] * 2 + ["objective=branch"] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["model=m", "seed=0,1", "out=runs/a"], "out=runs/a must differ between the jobs of -m, got one"),
        ([*SPEED, "seed=1,-1", "k=1", "rounds=0"], "rounds must be at least 1, got 0"),
        ([*SPEED, "seed=0,x"], "seed must be a whole number, got 'x'"),
        ([*SPEED, "seed=interval(0,1)"], "seed must be values with commas for -m, got interval"),
    ],
)
def test_a_sweep_is_refused_before_its_first_job(given: list[str], message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        sweep("speed", SpeedConfig, given)


def test_a_sweep_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="^-m must run in one process, got torchrun. Use a shell loop: for L"):
        sweep("train", TrainConfig, [])


def test_every_job_runs_with_its_own_settings() -> None:
    """`-m objective.L=3,5` was refused as no setting."""
    out = "out=x/${objective.L}"
    ended = run_sweep("-m", "plan=true", "objective=branch", "objective.L=3,5", out)
    assert ended.returncode == 0, ended.stderr
    jobs = ["job 1 of 2: objective.L=3", "branch, L=3", "job 2 of 2: objective.L=5", "branch, L=5"]
    assert re.findall(r"job \d of 2: .*|branch, L=\d", ended.stdout) == jobs


def test_a_failed_job_is_followed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = run_sweep("-m", f"out={tmp_path}/${{seed}}", "seed=1,2", "data.path=nothing")
    assert ended.returncode == 2 and ended.stderr.count("data.path=nothing must be a finished folder") == 2
    assert ended.stderr.endswith("train: 2 of 2 jobs failed: seed=1; seed=2\n")


def run_sweep(*arguments: str) -> subprocess.CompletedProcess[str]:
    command: list[Any] = [sys.executable, "-m", "train", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
