"""Sweeps: the results of jobs, and jobs that run as commands, for example under torchrun."""

import importlib.util
import sys
from pathlib import Path

import pytest

from hydra_plugins.torchrun_launcher import as_word
from tests.conf.conftest import command
from tests.messages import error

JOB = """
import os
from conf.errors import UserError
from conf.settings.cli import run
from data_prep.inspect import InspectConfig

def main(config):
    print(config.inspect.seed, config.out, os.environ.get("LOCAL_RANK"))
    if config.inspect.seed == 5:
        raise UserError("seed must not be 5")
    return config.inspect.seed / 2

run("inspect", InspectConfig, main)
"""


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("out=runs/$\\{seed\\}", "out='runs/${seed}'"),
        ("dtype='float32'", "dtype='float32'"),
        ("steps=3", "steps=3"),
        ("experiment=demo", "experiment=demo"),
        ("out=runs/${seed}", "out=runs/${seed}"),
        ("lora.targets=[a,b]", "lora.targets=[a,b]"),
        ("out=null", "out=null"),
    ],
)
def test_a_sweepers_override_is_a_word_of_a_command(override: str, word: str) -> None:
    """Regression: Optuna's escaped braces became part of the folder's name.

    Then every text was quoted, so the printed command was experiment='"'"'demo'"'"'.
    """
    assert as_word(override) == word


@pytest.mark.parametrize(
    ("name", "package", "override"),
    [
        ("hydra_joblib_launcher", "hydra-joblib-launcher", "hydra/launcher=joblib"),
        (
            "hydra_submitit_launcher",
            "hydra-submitit-launcher",
            "hydra/launcher=submitit_slurm",
        ),
        ("hydra_optuna_sweeper", "hydra-optuna-sweeper", "hydra/sweeper=optuna"),
    ],
)
def test_a_missing_launcher_is_named_by_its_package(
    name: str, package: str, override: str, tmp_path: Path
) -> None:
    """Regression: the message was "hydra/launcher must be basic or torchrun, got joblib"."""
    if importlib.util.find_spec(f"hydra_plugins.{name}"):
        pytest.skip(f"{package} is installed")
    end = command("-c", JOB, "-m", override, "inspect.seed=3,4", "out=r", cwd=tmp_path)
    assert end.returncode == 2
    assert error(end.stderr) == (
        f"{override} needs the package {package}, got none. Install it: pip install {package}"
    )


def test_the_jobs_of_a_sweep_are_commands(tmp_path: Path) -> None:
    """Regression: -m and torchrun were refused together, so torchrun sweeps needed a shell loop.

    Then the jobs were started without the sweep's --config-dir, and without its hydra.searchpath.
    """
    for name, line in (
        ("own", "out: r/${inspect.seed}"),
        ("more", "inspect: {tokens: 9}"),
    ):
        (tmp_path / name / "experiment").mkdir(parents=True)
        file = tmp_path / name / "experiment" / f"{name}.yaml"
        file.write_text(f"# @package _global_\n{line}\n")
    program = tmp_path / "job.py"
    program.write_text(JOB)
    words = [
        "hydra/launcher=torchrun",
        "inspect.seed=3,4,5,6",
        "+experiment=[own,more]",
        f"hydra.searchpath=[file://{tmp_path}/more]",
    ]
    started = f"hydra.launcher.command='env LOCAL_RANK=0 {sys.executable} {program}'"
    end = command(str(program), "-m", *words, started, "--config-dir=own", cwd=tmp_path)
    lines = [line for line in end.stdout.splitlines() if not line.startswith("sweep: ")]
    assert lines == ["3 r/3 0", "4 r/4 0", "5 r/5 0"]
    assert end.returncode == 2 and error(end.stderr) == "seed must not be 5"


def test_a_job_leaves_what_it_returns(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    end = command(
        "-c", JOB, "inspect.seed=3", "out=r", cwd=tmp_path, SWEEP_RESULT=str(file)
    )
    assert (end.returncode, file.read_text()) == (0, "1.5")


def test_a_value_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    """Bug: under Slurm the file was in the /tmp of the submitting machine; each job ended with code 2."""
    file = str(tmp_path / "absent" / "result.json")
    end = command("-c", JOB, "inspect.seed=3", "out=r", cwd=tmp_path, SWEEP_RESULT=file)
    assert end.returncode == 0
    assert end.stderr.startswith("warning: the sweep does not get the value 1.5: ")


def test_jobs_with_one_folder_are_refused_before_the_first(tmp_path: Path) -> None:
    """Bug: the second job found the first one's result, after hours."""
    words = "hydra/launcher=torchrun", "hydra.launcher.command=false"
    end = command("-c", JOB, "-m", *words, "inspect.seed=3,4", "out=r", cwd=tmp_path)
    assert end.returncode == 2
    assert error(end.stderr).startswith("out must differ between the jobs of a sweep, ")


# Like Optuna's sweeper, it lets jobs fail. Hydra only loads sweepers of its own package and hydra_plugins.
TOLERANT = """
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

class Tolerant(BasicSweeper):
    def __init__(self, max_batch_size, params, max_failure_rate):
        super().__init__(max_batch_size, params)

    def sweep(self, arguments):
        for seed in (3, 5, 4):
            words = [*arguments, f"inspect.seed={seed}", f"out=r/{seed}"]
            (job,) = self.launcher.launch([words], initial_job_idx=0)
            print("got", job.status.name, job._return_value)
"""


@pytest.mark.parametrize("launcher", ["basic", "torchrun"])
def test_a_sweeper_that_allows_failures_goes_on(tmp_path: Path, launcher: str) -> None:
    """Bug: a diverged trial ended an Optuna search for good, whatever max_failure_rate was."""
    program = tmp_path / "job.py"
    program.write_text(JOB)
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "tolerant.py").write_text(TOLERANT)
    started = f"hydra.launcher.command='{sys.executable} {program}'"
    words = [started] if launcher == "torchrun" else []
    end = command(
        *(str(program), "-m", f"hydra/launcher={launcher}", *words),
        "hydra.sweeper._target_=hydra_plugins.tolerant.Tolerant",
        "+hydra.sweeper.max_failure_rate=1.0",
        cwd=tmp_path,
    )
    lines = [line for line in end.stdout.splitlines() if line.startswith("got ")]
    assert lines[0] == "got COMPLETED 1.5" and lines[2] == "got COMPLETED 2.0"
    assert lines[1].startswith("got FAILED ")
    assert "error: seed must not be 5" in end.stderr
