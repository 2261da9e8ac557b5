"""Hostile programs: each gets its verdict, reaches nothing outside, and leaves no process."""

import os
import re
import shutil
import socket
import time
from collections.abc import Iterator

import pytest
from psutil import process_iter

from infer.bench.sandbox import ProgramLimits, judge, unavailable

LIMITS = ProgramLimits(cpu_seconds=1, wall_seconds=5, memory=256, processes=6, file=1)
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
    "sleep": ("import time; time.sleep(60)", "timed out", "after 5 s"),
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


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A file, a server and a process of ours."""
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
    verdict = judge(source, TESTS, LIMITS)
    assert verdict.result == result, verdict
    assert re.search(message, verdict.message), verdict


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
    assert "without bwrap. Install bubblewrap" in unavailable()
    unavailable.cache_clear()
