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
