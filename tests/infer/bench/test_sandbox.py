"""Test hostile programs: each gets its verdict, has no effect outside, and leaves no process."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from psutil import process_iter

from infer.bench import sandbox
from infer.bench.sandbox import ProgramLimits, judge, unavailable

LIMITS = ProgramLimits(cpu_seconds=1, wall_seconds=5, memory=256, processes=6, file=1)
BRIEF = replace(LIMITS, wall_seconds=2)  # for a program that only sleeps
TESTS = "assert f(1) == 2"
ATTEMPT = "def f(x):\n    try:\n        {}\n        return 2\n    except Exception:\n        return 1\n"

# program (which would pass if its attack succeeded), result, pattern of the message
PROGRAMS = {
    "right": ("def f(x): return x + 1", "passed", ""),
    "not Python": ("def f(x:", "failed", "SyntaxError"),
    "exit": ("import os\ndef f(x): os._exit(0)", "failed", "before the end"),
    "endless loop": (
        "while True:\n try:\n  while True: pass\n except: pass",
        "timed out",
        "1 s of CPU time",
    ),
    "sleep": ("import time; time.sleep(60)", "timed out", "after 2 s"),
    "fork bomb": (
        "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
        "timed out",
        "",
    ),
    "memory": ("x = bytearray(1 << 30)", "out of memory", "MemoryError"),
    "large file": ("open('x', 'wb').write(bytes(1 << 21))", "failed", "File too large"),
}
ATTACKS = {
    "reads our file": "open('{outside}/secret').read()",
    "writes /usr": "open('/usr/mine', 'w')",
    "processes": "__import__('os').kill({process}, 0)",
    "network": "__import__('socket').create_connection(('127.0.0.1', {port}), 1)",
    "becomes root": "__import__('os').setgroups([0])",
}
for name, attack in ATTACKS.items():
    PROGRAMS[name] = (ATTEMPT.format(attack), "failed", "AssertionError")

# Programs that pass if they hold 12 MiB where files have at most 1 MiB and folders 4 MiB.
FILL = "for n in range(16): open(f'{folder}/{{n}}', 'wb').write(bytes(3 << 18))\n"
IPC = "import ctypes\nassert ctypes.CDLL(None).{call} >= 0\n"
MEMORY = {
    "/dev": FILL.format(folder="/dev"),
    "/dev/shm": FILL.format(folder="/dev/shm"),
    "/tmp": FILL.format(folder="/tmp"),
    "memfd": "import os\nfor _ in range(16): os.write(os.memfd_create('x'), bytes(3 << 18))\n",
    "shared memory of System V": IPC.format(call="shmget(0, 12 << 20, 0o1600)"),
    "messages of System V": IPC.format(call="msgget(0, 0o1600)"),
    "unshared user namespace": IPC.format(call="unshare(0x10000000)"),
    "cloned user namespace": IPC.format(
        call="syscall({clone}, 0x10000011, 0, 0, 0, 0)"
    ),
}
USER = [
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "/usr/bin/python3",
    "-",
]


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield a file, a server and a process outside of the sandbox."""
    if reason := unavailable():
        pytest.skip(reason)
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_text("ours")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        yield {"{outside}": str(outside), "{port}": port, "{process}": str(os.getpid())}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_gets_its_verdict(marks: dict[str, str], name: str) -> None:
    source, result, message = PROGRAMS[name]
    for mark, value in marks.items():
        source = source.replace(mark, value)
    verdict = judge(source, TESTS, BRIEF if name == "sleep" else LIMITS)
    assert verdict.result == result, verdict
    assert re.search(message, verdict.message), verdict


def memory_programs() -> dict[str, str]:
    clone = str(sandbox.CLONE[os.uname().machine])
    end = "def f(x): return x + 1"
    return {
        name: source.replace("{clone}", clone) + end for name, source in MEMORY.items()
    }


@pytest.mark.parametrize("name", MEMORY)
def test_memory_outside_the_limits_is_refused(marks: dict[str, str], name: str) -> None:
    """Regression: with a limit of 256 MiB a program allocated 495: in /dev, memfd, and its own tmpfs."""
    verdict = judge(memory_programs()[name], TESTS, LIMITS)
    assert verdict.result == "failed", verdict
    assert re.search(
        "No space left|Read-only|Permission denied|not permitted|AssertionError",
        verdict.message,
    )


def test_memory_is_refused_to_programs_of_an_ordinary_user(
    marks: dict[str, str],
) -> None:
    """Regression: a program of an ordinary user owned /dev. This test runs the sandbox as a user."""
    if os.geteuid() or not Path(USER[-2]).exists():
        pytest.skip("the other tests are an ordinary user's, or there is no python3")
    programs = {**memory_programs(), "right": PROGRAMS["right"][0]}
    calls = f"for source in {list(programs.values())}: print(judge(source, {TESTS!r}, {LIMITS}))"
    source = Path(sandbox.__file__).read_text() + calls
    done = subprocess.run(
        USER, input=source, cwd="/", capture_output=True, text=True, check=False
    )
    *verdicts, right = done.stdout.splitlines()
    if right != "passed":
        pytest.skip(f"this machine gives users no namespaces: {right}")
    assert len(verdicts) == len(MEMORY) and all(
        v.startswith("failed") for v in verdicts
    )


def test_threads_and_processes_still_work(marks: dict[str, str]) -> None:
    """The C library starts threads and processes by clone without clone3; locks are in /dev/shm."""
    source = """
import multiprocessing, subprocess, threading
def f(x):
    value = multiprocessing.get_context("fork").Value("i", x)
    def add(): value.value += 1
    thread = threading.Thread(target=add)
    thread.start(); thread.join()
    assert subprocess.run(["/bin/true"]).returncode == 0
    return value.value
"""
    verdict = judge(source, TESTS, ProgramLimits(memory=512))
    assert verdict.passed, verdict


def test_no_process_is_left(marks: dict[str, str]) -> None:
    """A program that the wall clock ended dies with its namespace."""
    mark = f"time.sleep(60 + {os.getpid()})"
    command = ["/python/bin/python3", "-c", f"import time; {mark}"]
    source = f"import os\nos.execv({command[0]!r}, {command})"
    assert judge(source, "", LIMITS).result == "timed out"
    deadline = time.monotonic() + 5
    while any(mark in str(p.info["cmdline"]) for p in process_iter(["cmdline"])):
        assert time.monotonic() < deadline, "a program still runs"
        time.sleep(0.05)


def test_without_bwrap_the_reason_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    unavailable.cache_clear()
    assert "needs bwrap. Install bubblewrap" in unavailable()
    unavailable.cache_clear()


def test_bubblewrap_may_be_anywhere_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: bwrap was searched on the caller's PATH but started from /usr/bin: a traceback."""
    bwrap = tmp_path / "bwrap"
    bwrap.write_text('#!/bin/sh\necho "$0" >&2; exit 3\n')
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert judge("", "").message == str(bwrap)
