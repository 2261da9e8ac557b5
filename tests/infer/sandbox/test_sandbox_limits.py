"""The level without walls: refused unless asked for; its limits hold, and nothing outlives it."""

import os
import re
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf import UserError
from infer.sandbox import Program, Sandbox, SandboxConfig, open_sandbox
from infer.sandbox import sandbox as module
from infer.sandbox.sandbox import try_sandbox

CONFIG = SandboxConfig(
    unconfined=True, wall_seconds=4, cpu_seconds=1, memory=192, processes=24, file=2, folder=4, output=0.25
)
BOMB = "fork bomb"
PROGRAMS = {
    "right": ("def f(x): return 2\n", "passed"),
    "wrong": ("def f(x): return 1\n", "failed: AssertionError"),
    BOMB: (
        "import os\nwhile True:\n    try:\n        if os.fork() == 0:\n            os.setsid()\n"
        "    except OSError:\n        pass\n",
        "too many processes|out of memory",
    ),
    "memory, by many": (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = b'x' * (40 << 20)\n"
        "        time.sleep(60)\ntime.sleep(60)\n",
        "out of memory",
    ),
    "seconds of children that nobody waits for": (
        "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\ndef f(x):\n"
        "    end = time.monotonic() + 3.5\n    while time.monotonic() < end:\n        for _ in range(4):\n"
        "            if os.fork() == 0:\n                while time.process_time() < 0.5: pass\n"
        "                os._exit(0)\n        try: os.wait()\n        except ChildProcessError: pass\n"
        "    return 2\n",
        "timed out after",
    ),
    # Its end once took the guard along: a RecursionError in a walk, and the evaluation ended in a traceback.
    "a folder nested without end": (
        "import os\ndef f(x):\n    for _ in range(3000):\n        os.mkdir('x')\n        os.chdir('x')\n"
        "    return 1\n",
        "failed: AssertionError|too much on disk",
    ),
    # A pipe can be set to signal whom its owner likes, with any signal: a kill that the filter did not refuse.
    "our lives, by a pipe": (
        "import fcntl, os\ndef f(x):\n    a, b = os.pipe()\n    try:\n        fcntl.fcntl(a, 8, os.getppid())\n"
        "        return 2\n    except OSError:\n        return 1\n",
        "failed: AssertionError",
    ),
    "endless loop": ("while True: pass\n", "timed out after"),
    "a full disk": (
        "import time\nfor n in range(4): open(str(n), 'wb').write(b'x' * (2 << 20))\ntime.sleep(60)\n",
        "too much on disk",
    ),
    "the network, our lives": (
        "import os, socket\ndef f(x):\n"
        "    for act in (socket.socket, lambda: os.kill(os.getppid(), 9), lambda: os.kill(-1, 9),\n"
        "                lambda: os.setuid(0)):\n        try:\n            act()\n"
        "            return 2\n        except OSError:\n            pass\n",
        "failed: AssertionError",
    ),
    "a daemon, a locked folder": (
        "import os, time\ndef f(x):\n    os.mkdir('x')\n    os.mkdir('x/y')\n    os.chmod('x', 0)\n"
        "    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            os.closerange(0, 100)\n            time.sleep(60)\n        os._exit(0)\n    return 1\n",
        "failed: AssertionError",
    ),
    "the end": ("import os\nos._exit(0)\n", "ended with code 0 before its tests did"),
}


@pytest.fixture(scope="module")
def limits() -> Sandbox:
    """With a Python that an unprivileged user may run."""
    for path in (None, "/usr/bin/python3"):
        if path is None or os.path.exists(path):
            sandbox = Sandbox("limits", replace(CONFIG, python=path))
            if not try_sandbox(sandbox):
                return sandbox
    pytest.skip("no Python that an unprivileged user may run")


def test_limits_hold_without_walls(limits: Sandbox) -> None:
    programs = {name: Program("python", source, "assert f(1) == 2") for name, (source, _) in PROGRAMS.items()}
    # Alone: without a namespace of users the kernel counts its processes with those of programs beside it.
    verdicts = {BOMB: limits.judge(programs.pop(BOMB))}
    verdicts |= zip(programs, limits.judge_all(list(programs.values()), workers=2), strict=True)
    for name, (_, reason) in PROGRAMS.items():
        assert re.match(reason, verdicts[name].reason), (name, verdicts[name])
        assert verdicts[name].passed == (reason == "passed")
    left, deadline = _remains(), time.monotonic() + 10
    while left & _remains() and time.monotonic() < deadline:  # other runs on this machine may have theirs
        time.sleep(0.1)
    assert not left & _remains()


def _remains() -> set[str]:
    """Processes of programs that live, and their folders."""
    result = {str(path) for path in Path("/tmp").glob("sandbox-*")}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if b"players.py" in path.read_bytes():
                result.add(str(path))
    return result


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"memory": 10}, "sandbox.memory must be at least 64, got 10"),
        ({"wall_seconds": 0}, "sandbox.wall_seconds must be more than 0, got 0"),
        ({"python": "/bin/false"}, "sandbox.python must be a Python interpreter, got /bin/false"),
        ({}, "sandbox.unconfined must be true where nothing confines"),
    ],
)
def test_what_nothing_could_run_in_is_refused(
    setting: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEVELS", ("namespaces", "limits"))
    monkeypatch.setattr(module, "try_sandbox", lambda box: "refused" if box.level == "namespaces" else "")
    with pytest.raises((ValueError, UserError), match=message):
        open_sandbox(SandboxConfig(**setting))
    opened = open_sandbox(SandboxConfig(unconfined=True))
    assert opened.level == "limits" and "UNCONFINED" in opened.description
