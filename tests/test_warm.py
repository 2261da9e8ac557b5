"""Test the fork server of tests/warm.py."""

import multiprocessing.forkserver
import os
import signal
import time
from pathlib import Path

import pytest

from tests import warm


def kill_server(mark: Path) -> None:
    """Kill the parent process, then sleep longer than a test may take."""
    mark.write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def test_a_killed_server_raises_an_error_and_its_processes_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the exit code was 255 without a message, and the ranks ran on during the next tests."""
    server = multiprocessing.forkserver.ForkServer()  # not the server of other tests
    monkeypatch.setattr(multiprocessing.forkserver, "_forkserver", server)
    for name in ("ensure_running", "connect_to_new_process"):
        monkeypatch.setattr(multiprocessing.forkserver, name, getattr(server, name))
    mark = tmp_path / "pid"
    with pytest.raises(RuntimeError, match="fork server .* was killed"):
        warm.call_ranks(kill_server, mark)
    deadline = time.monotonic() + 5
    while mark.is_file() and Path("/proc", mark.read_text()).exists():
        assert time.monotonic() < deadline, "a process still runs"
        time.sleep(0.05)
