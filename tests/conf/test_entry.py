"""Errors of files, as the command line tells them."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conf import run
from infer.config import InferConfig
from tests.full_disk import largest_file
from tests.told import error


def told(main, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a stage that ends with an error says."""
    monkeypatch.setattr(sys, "argv", ["infer", "model=m", "prompt=x"])
    with pytest.raises(SystemExit) as end:
        run("infer", InferConfig, main)
    assert end.value.code == 2
    return error(capsys.readouterr().err)


def test_of_a_copy_the_file_that_has_no_place_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk was told of the file that was read: "/data/tokenizer.json: No space left on device"."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(2000))
    with largest_file(1000):
        sentence = told(lambda config: shutil.copyfile(source, target), monkeypatch, capsys)
    assert sentence == f"{target}: File too large"


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO]
)
def test_a_disk_that_takes_no_more_is_one_sentence(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file larger than the file system or `ulimit -f` allows was a traceback, and so was a broken disk."""

    def fail(config: InferConfig) -> None:
        raise OSError(number, "told by the system", "place")

    assert told(fail, monkeypatch, capsys) == "place: told by the system"


def test_ctrl_c_while_a_command_is_importing_prints_nothing(tmp_path: Path) -> None:
    """Ctrl-C during --help was a traceback of whichever import it met."""
    (tmp_path / "hydra.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    command = [sys.executable, "-m", "train", "--help"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGINT and ended.stdout + ended.stderr == ""
