"""Hostile programs: each gets its verdict, reaches nothing outside, and leaves no process."""

import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infer.bench import sandbox
from infer.bench.sandbox import ProgramLimits, Verdict, judge, unavailable

LIMITS = ProgramLimits(cpu_seconds=1, wall_seconds=5, memory=256, processes=6, file=1)
TESTS = "assert f(1) == 2"
ATTEMPT = "def f(x):\n    try:\n        {}\n        return 2\n    except Exception:\n        return 1\n"

# name, program (which would pass if its attack succeeded), result, pattern of the message
PROGRAMS = [
    ("right", "def f(x): return x + 1", "passed", ""),
    ("wrong", "def f(x): return x", "failed", "AssertionError"),
    ("not Python", "def f(x:", "failed", "SyntaxError"),
    ("another function", "def g(x): return 2", "failed", "NameError"),
    ("sys.exit", "import sys; sys.exit(0)", "failed", "before the end"),
    ("os._exit", "import os; os._exit(0)", "failed", "before the end"),
    (
        "os._exit when called",
        "import os\ndef f(x): os._exit(0)",
        "failed",
        "before the end",
    ),
    (
        "a printed passed",
        "import os; print('passed', flush=True); os._exit(0)",
        "failed",
        "before the end",
    ),
    ("kill all", "import os; os.kill(-1, 9)", "failed", ""),
    ("endless loop", "while True: pass", "timed out", "1 s of CPU time"),
    (
        "loop that catches all",
        "while True:\n try:\n  while True: pass\n except: pass",
        "timed out",
        "CPU time",
    ),
    ("sleep", "import time; time.sleep(60)", "timed out", "after 5 s"),
    (
        "fork bomb",
        "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
        "timed out",
        "",
    ),
    (
        "daemon",
        "import os, time\nif os.fork() == 0:\n os.setsid(); time.sleep(60)",
        "failed",
        "NameError",
    ),
    ("memory", "x = bytearray(1 << 30)", "out of memory", "MemoryError"),
    ("large file", "open('x', 'wb').write(bytes(1 << 21))", "failed", "File too large"),
    (
        "many files",
        "for n in range(9): open(str(n), 'wb').write(bytes(1 << 20))",
        "failed",
        "No space left",
    ),
    ("much output", "print('x' * (1 << 22))", "failed", "File too large"),
    ("stdin is empty", "def f(x): return x + 1 + len(open(0).read())", "passed", ""),
    (
        "reads our file",
        ATTEMPT.format("open('{outside}/secret').read()"),
        "failed",
        "AssertionError",
    ),
    (
        "reads /etc",
        ATTEMPT.format("open('/etc/passwd').read()"),
        "failed",
        "AssertionError",
    ),
    (
        "writes /usr",
        ATTEMPT.format("open('/usr/mine', 'w')"),
        "failed",
        "AssertionError",
    ),
    ("writes /", ATTEMPT.format("open('/mine', 'w')"), "failed", "AssertionError"),
    (
        "environment",
        ATTEMPT.format("__import__('os').environ['BENCH_SECRET']"),
        "failed",
        "AssertionError",
    ),
    (
        "processes",
        ATTEMPT.format("__import__('os').kill({process}, 0)"),
        "failed",
        "AssertionError",
    ),
    (
        "network",
        ATTEMPT.format(
            "__import__('socket').create_connection(('127.0.0.1', {port}), 1)"
        ),
        "failed",
        "AssertionError",
    ),
    (
        "higher limits",
        ATTEMPT.format(
            "r = __import__('resource'); r.setrlimit(r.RLIMIT_AS, (-1, -1))"
        ),
        "failed",
        "AssertionError",
    ),
    (
        "becomes root",
        ATTEMPT.format("__import__('os').setgroups([0])"),
        "failed",
        "AssertionError",
    ),
]


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A file, a server and a process of ours."""
    if reason := unavailable():
        pytest.skip(reason)
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_text("ours")
    os.environ["BENCH_SECRET"] = "ours"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        yield {"{outside}": str(outside), "{port}": port, "{process}": str(os.getpid())}
    del os.environ["BENCH_SECRET"]


@pytest.mark.parametrize(
    ("source", "result", "message"),
    [row[1:] for row in PROGRAMS],
    ids=[row[0] for row in PROGRAMS],
)
def test_each_program_gets_its_verdict(
    marks: dict[str, str], source: str, result: str, message: str
) -> None:
    for mark, value in marks.items():
        source = source.replace(mark, value)
    verdict = judge(source, TESTS, LIMITS)
    assert verdict.result == result, verdict
    assert re.search(message, verdict.message), verdict


def test_no_process_is_left(marks: dict[str, str]) -> None:
    """A daemon and a program that the wall clock ended die with their namespace."""
    mark = f"time.sleep(60 + {os.getpid()})"
    python = "/python/bin/python3"
    source = (
        f"import os\nos.execv('{python}', ['{python}', '-c', 'import time; {mark}'])"
    )
    assert judge(source, "", LIMITS).result == "timed out"
    deadline = time.monotonic() + 5
    while any(mark in _command(entry) for entry in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() < deadline, "a program still runs"
        time.sleep(0.05)


def _command(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def test_without_bwrap_or_namespaces_the_reason_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unavailable.cache_clear()
    monkeypatch.setattr(
        sandbox,
        "judge",
        lambda source, tests: Verdict("failed", "bwrap: No permissions"),
    )
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "must create namespaces, got bwrap: No permissions" in unavailable()
    unavailable.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "without bwrap. Install it" in unavailable()
    unavailable.cache_clear()
