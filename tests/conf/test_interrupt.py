"""Ctrl-C while a command starts."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conf.runs.stage import ROOT
from conf.settings.cli import exit_on_error
from conf.settings.interrupt import is_command

#: Hydra imports this module; the test makes it as slow as on a cold disk.
SLOW = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"


@pytest.mark.parametrize("module", ["infer", "data_prep", "train.export"])
def test_ctrl_c_while_a_command_is_imported_is_one_line(
    tmp_path: Path, module: str
) -> None:
    """Ctrl-C printed a traceback of up to 84 lines."""
    (tmp_path / "hydra.py").write_text(SLOW)
    end = subprocess.run(
        [sys.executable, "-m", module],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        # Background jobs and their children ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (end.returncode, end.stderr) == (130, "interrupted\n")


def test_an_import_error_that_ctrl_c_caused_is_no_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Transformers raised "Could not import module" for Ctrl-C: a traceback and exit code 1."""
    with pytest.raises(SystemExit) as end, exit_on_error():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ModuleNotFoundError("could not import module") from error
    assert end.value.code == 130 and not capsys.readouterr().err


def test_other_programs_keep_their_hook() -> None:
    assert is_command(["python", "-u", "-m", "infer.bench", "out=x"])
    assert not is_command(["python", "-m", "pytest", "tests"])
    assert not is_command(["python", "program.py"])
