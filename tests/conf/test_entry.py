"""Commands as a whole: errors of files, help, Ctrl-C, the console script."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conf import run
from conf.cli import COMMANDS, main
from docs.reference import ENTRIES
from infer.config import InferConfig
from tests.full_disk import largest_file
from tests.messages import error

INFER = ("infer", "model=m", "prompt=x")


def test_of_a_copy_the_file_that_has_no_place_is_named(
    tmp_path: Path, failed: Callable
) -> None:
    """A full disk was blamed on the file that was read: "/data/tokenizer.json: No space left on device"."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(2000))
    with largest_file(1000):
        code, message = failed(
            *INFER, main=lambda config: shutil.copyfile(source, target)
        )
    assert (code, error(message)) == (2, f"{target}: File too large")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EFBIG, errno.EIO])
def test_a_disk_that_takes_no_more_is_one_sentence(
    number: int, failed: Callable
) -> None:
    """A file larger than the file system or `ulimit -f` allows was a traceback, and so was a broken disk."""

    def fail(config: InferConfig) -> None:
        raise OSError(number, "told by the system", "place")

    code, message = failed(*INFER, main=fail)
    reason = (
        "disk full (told by the system)"
        if number == errno.ENOSPC
        else "told by the system"
    )
    assert (code, error(message)) == (2, f"place: {reason}")


def test_ctrl_c_while_a_command_is_importing_prints_nothing(tmp_path: Path) -> None:
    """Ctrl-C during --help was a traceback of whichever import it met."""
    (tmp_path / "hydra.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    command = [sys.executable, "-m", "train", "--help"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGINT and ended.stdout + ended.stderr == ""


@pytest.mark.parametrize("flag", [["--cfg"], ["-c", "job"], ["--cfg", "job"]])
def test_cfg_prints_the_settings_and_does_nothing(
    flag: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["infer", "prompt=a: [b]", *flag, "decode=plain"])
    run("infer", ENTRIES["infer"], lambda config: pytest.fail("it ran"))
    printed = capsys.readouterr().out
    assert (
        printed.startswith(
            "model:\n  path: ???\n  adaptive_ids: []\n  L: 0\nprompt: 'a: [b]'\n"
        )
        and "\n  method: plain\n" in printed
    )


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--local_rank=0"], "--help lists the settings\n  see docs/settings/infer.md"),
        (["prompt"], "--help lists the settings\n  see docs/settings/infer.md"),
        (["--model", "X"], "Write model=X"),
        (["--model=X"], "Write model=X"),
    ],
)
def test_what_is_no_setting_is_reported_in_one_sentence(
    arguments: list[str], advice: str, failed: Callable
) -> None:
    """Hydra's: "LexerNoViableAltException: --local_rank=0" and "missing EQUAL at '<EOF>'"."""
    start = f"error: settings must be given as name=value, got '{arguments[0]}'. "
    assert failed("infer", *arguments, "prompt=x") == (2, f"{start}{advice}\n")


def test_every_command_of_the_console_script_is_a_module_with_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("generate", "bench"):
        monkeypatch.setattr(sys, "argv", ["adaptive-tokens", name, "--help"])
        main()
        assert f"python -m {COMMANDS[name]}" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["adaptive-tokens"])
    main()
    assert "python -m infer.bench" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["adaptive-tokens", "sped"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "error: the command must be one of data, train" in capsys.readouterr().err
