"""launch/setup.sh in a folder of its own, with a lock that asks for nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_python_that_does_not_start_is_passed_over(tmp_path: Path) -> None:
    """pyenv's python3.11 may only print that no such version is chosen. A .venv without
    pip is not finished. Nothing but model=smollm2 needs its package.
    """
    for place in ("launch", "programs", ".venv/bin"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "requirements.lock").touch()
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    script = shutil.copy(ROOT / "launch" / "setup.sh", tmp_path / "launch")
    pythons = {"python3.11": "exit 127", "python3.12": f'exec "{sys.executable}" "$@"'}
    for name, line in pythons.items():
        program = tmp_path / "programs" / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    path = f"{tmp_path / 'programs'}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PIP_NO_INDEX": "1"}
    run = subprocess.run(["bash", script], env=env, check=True, stderr=subprocess.PIPE)
    assert b"warning: model=smollm2" in run.stderr
    for made in ("bin/pip", "installed.lock"):
        assert (tmp_path / ".venv" / made).exists()
