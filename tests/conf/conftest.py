"""Run commands as users run them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.settings.cli import run
from infer.config import InferConfig

ROOT = Path(__file__).parents[2]


def command(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a folder."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Return a function that runs an entry; it returns the exit code and stderr."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def call(
        *words: str,
        entry: str = "infer",
        schema: type = InferConfig,
        main: Callable = lambda config: None,
    ) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [entry, *words])
        with pytest.raises(SystemExit) as end:
            run(entry, schema, main)
        return end.value.code, capsys.readouterr().err

    return call
