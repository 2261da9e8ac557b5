"""launch/setup.sh in a folder of its own, with a lock that asks for nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def set_up(folder: Path, pythons: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """With these Pythons first on the path: each a script of one line."""
    for place in ("launch", "programs"):
        (folder / place).mkdir()
    (folder / "requirements.lock").touch()
    script = shutil.copy(ROOT / "launch" / "setup.sh", folder / "launch")
    for name, line in pythons.items():
        program = folder / "programs" / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    path = f"{folder / 'programs'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", script],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Set up beside a Python that does not start, over an environment that was broken off."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    run = set_up(
        folder,
        {"python3.11": "exit 127", "python3.12": f'exec "{sys.executable}" "$@"'},
    )
    assert run.returncode == 0, run.stderr
    return folder


def test_a_python_that_does_not_start_is_passed_over(checkout: Path) -> None:
    """pyenv puts a python3.11 on the path that only says that no such version is chosen: setup ended with that.
    And where making .venv had been broken off, or Debian's python3-venv was missing, a Python without pip was
    left, and every later setup took it for a finished environment.
    """
    assert (checkout / ".venv" / "bin" / "pip").exists() and (
        checkout / ".venv" / "installed.lock"
    ).exists()


def test_no_python_is_one_sentence(tmp_path: Path) -> None:
    old = 'test "$1" = --version && echo Python 3.9.2'
    run = set_up(
        tmp_path, {"python3.11": "exit 127", "python3.12": "exit 127", "python3": old}
    )
    assert run.returncode == 2
    assert (
        run.stderr
        == "error: wanted Python 3.11 or newer on the path, found Python 3.9.2\n"
    )
    assert not (tmp_path / ".venv").exists()
