"""The launch scripts under stubs of Slurm's commands."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conf import settings
from data_prep.config import DataPrepConfig
from infer.bench.config import BenchConfig
from infer.regenerate import RegenerateConfig
from train.config import TrainConfig
from train.export import ExportConfig

ROOT = Path(__file__).parents[2]

ENTRIES: dict[str, tuple[str, Any]] = {
    "data_prep": ("data_prep", DataPrepConfig),
    "train": ("train", TrainConfig),
    "train.export": ("export", ExportConfig),
    "infer.regenerate": ("regenerate", RegenerateConfig),
    "infer.bench": ("bench", BenchConfig),
}
RECORD = """[[ $1 != -c ]] || { echo 2; exit; }  # how many ranks
{ printf "%q " "$@"; echo; } >>"$CALLS"
"""


def stub(folder: Path, **scripts: str) -> None:
    """Write executables to stand in for commands."""
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)


def project_of(folder: Path, *scripts: str) -> Path:
    """Make a project of these launch scripts, with an environment to activate."""
    (folder / "launch").mkdir(parents=True)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    for name in scripts:
        shutil.copy(ROOT / "launch" / name, folder / "launch")
    return folder


def launch(
    name: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    remaining = {
        key: value
        for key, value in os.environ.items()
        if key not in ("NODES", "HEAD", "RUN")
    }
    return subprocess.run(
        ["bash", f"launch/{name}", *arguments],
        cwd=ROOT,
        env=remaining | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (75, True), (1, False)])
def test_a_job_that_saved_before_its_limit_is_queued_again(
    code: int, requeued: bool, tmp_path: Path
) -> None:
    stub(
        tmp_path,
        srun='echo "srun $* NODES=$NODES HEAD=$HEAD RUN=$RUN" >>"$CALLS"; exit "$CODE"',
        scontrol='echo "scontrol $*" >>"$CALLS"; [[ $1 != show ]] || printf "node7\\nnode8\\n"',
    )
    calls = tmp_path / "calls"
    job = {
        "JOB_ID": "42",
        "JOB_NUM_NODES": "2",
        "JOB_NODELIST": "node[7-8]",
        "SUBMIT_DIR": str(ROOT),
    }
    job["CPUS_ON_NODE"] = "96"
    slurm = {f"SLURM_{key}": value for key, value in job.items()}
    path = f"{tmp_path}:{os.environ['PATH']}"
    run = launch(
        "train_slurm.sh",
        "out=a b",
        PATH=path,
        CALLS=str(calls),
        CODE=str(code),
        **slurm,
    )
    assert run.returncode == code, run.stderr
    message = calls.read_text()
    assert (
        "launch/train_multinode.sh out=a b NODES=2 HEAD=node7:29400 RUN=42" in message
    )
    assert "srun --cpus-per-task=96 " in message, "srun gave the task one core"
    assert ("scontrol requeue 42" in message) == requeued


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"RANKS": "8"}, "4"),
        ({"RANKS": "64"}, "1"),
        ({}, "16"),
        ({"RANKS": "gpu"}, "1"),
        ({"RANKS": "8", "OMP_NUM_THREADS": "3"}, "3"),
    ],
)
def test_every_rank_gets_its_share_of_the_cores(
    environment: dict[str, str], threads: str, tmp_path: Path
) -> None:
    """torchrun gave each of several ranks one thread: an optimizer on the CPU stepped
    on one core of 32.
    """
    project = project_of(tmp_path / "project", "train.sh")
    gpus = {"nvidia-smi": "echo GPU 0; echo GPU 1"}
    stub(tmp_path, torchrun='echo "threads $OMP_NUM_THREADS"', nproc="echo 32", **gpus)
    remaining = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_NUM_THREADS", "RANKS")
    }
    remaining |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", **environment}
    run = subprocess.run(
        ["bash", "launch/train.sh"],
        cwd=project,
        env=remaining,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == f"threads {threads}\n", run.stderr


def test_the_demo_runs_every_stage_with_settings_that_compose(tmp_path: Path) -> None:
    project = project_of(tmp_path / "project", "demo.sh", "pipeline.sh", "evaluate.sh")
    (project / "launch" / "setup.sh").touch()
    calls = tmp_path / "calls"
    stub(tmp_path, python=RECORD, torchrun=RECORD)
    run = subprocess.run(
        ["bash", str(project / "launch" / "demo.sh"), str(tmp_path / "out")],
        env=os.environ
        | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    called = []
    for line in calls.read_text().splitlines():
        words = shlex.split(line)
        at = words.index("-m") + 1
        entry, schema = ENTRIES[words[at]]
        composed: Any = settings(
            entry, schema, words[at + 1 :]
        )  # raises for names that do not exist
        assert composed.out.startswith(str(tmp_path / "out"))
        called.append(words[at])
        if words[at] == "data_prep" and len(called) == 1:
            assert "experiment=demo" in words
    base = ["data_prep", "train", "train.export", "infer.regenerate", "data_prep"]
    assert called == [
        *base,
        *["train"] * 2,
        *["train.export"] * 2,
        "infer.bench",
    ]
