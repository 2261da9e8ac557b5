"""Standard output that is full, closed or without a reader, of every command: all go through `run`."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from docs.reference import ENTRIES
from infer.regenerate import RegenerateConfig
from tests.messages import error


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_output_that_is_full_is_named_and_one_that_nobody_reads_ends_quietly(
    entry: str, monkeypatch: pytest.MonkeyPatch, failed: Callable
) -> None:
    """`> /dev/full` was reported as "out=runs/demo/data: No space left on device", or not at all with code 120;
    `| head -1` was a traceback of BrokenPipeError.
    """
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, message = failed(entry, "--help")
    assert (code, error(message)) == (
        2,
        "standard output: disk full (No space left on device)",
    )
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert failed(entry, "--help") == (1, "")


def test_a_result_that_cannot_be_written_is_still_reported_by_its_setting(
    failed: Callable,
) -> None:
    def fill(config: RegenerateConfig) -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    code, message = failed(
        "regenerate", "out=there", "model=m", "data.path=d", main=fill
    )
    assert error(message) == "out=there: disk full (No space left on device)"


PRINT = """
import sys
from conf import run
from infer.regenerate import RegenerateConfig

def main(config):
    with open(sys.argv[1].removeprefix("out="), "w") as file:  # as a result that is open while others print
        subprocess.run(["echo", "stray"])
        print("a line")
        file.write("result")

import subprocess
run("regenerate", RegenerateConfig, main)
"""


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("how", ["> /dev/full", ">&-", "<&- >&- 2>&-", "| true"])
def test_of_a_process_too(how: str, unbuffered: bool, tmp_path: Path) -> None:
    """With a closed output the result's file had its descriptor, and what another program printed was in it."""
    out = tmp_path / "out"
    python = f'"{sys.executable}" {"-u" if unbuffered else ""}'
    arguments = f"out={out} model=m data.path=d"
    command = f'{python} -c "$PRINT" {arguments} {how}; exit ${{PIPESTATUS[0]}}'
    end = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PRINT": PRINT},
        capture_output=True,
        text=True,
    )
    if how == "> /dev/full":
        assert end.returncode == 2
        assert (
            "error: standard output: disk full (No space left on device)" in end.stderr
        )
    elif how != "| true":  # which may end before or after the print
        assert end.returncode == 0 and end.stderr == ""
        assert out.read_text() == "result"
    assert "Traceback" not in end.stderr and "Exception ignored" not in end.stderr
