"""Hostile programs: each is contained and scored as failed, and the machine is as it was.

A program whose attack is to be refused is written so that it would pass if the attack succeeded.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import infer
from conf import UserError
from infer.sandbox import Program, Sandbox, SandboxConfig, Verdict, open_sandbox

SECRET = "a-secret-of-ours"
PROJECT = Path(infer.__file__).parent
OWN_CGROUP = max(Path("/proc/self/cgroup").read_text().split(), key=len).rpartition(":")[2].strip("/")
TESTS = "assert f(1) == 2"
LIMITS = SandboxConfig(wall_seconds=6, cpu_seconds=1, memory=192, processes=24, file=2, folder=4, output=0.25)

# The name: the program, and the reason of the verdict (a pattern).
ENDED = {
    "a fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n",
        "too many processes",
    ),
    "a fork bomb in a new session": (
        "import os\nwhile True:\n    try:\n        if os.fork() == 0:\n            os.setsid()\n"
        "    except OSError:\n        pass\n",
        "too many processes",
    ),
    "a bomb of threads": (
        "import threading, time\nwhile True:\n    try:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "    except RuntimeError:\n        pass\n",
        "too many processes|out of memory",
    ),
    "memory, by one": ("x = []\nwhile True:\n    x.append(bytearray(1 << 22))\n", "out of memory"),
    "memory, at once": ("x = bytearray(1 << 34)\n", "out of memory"),
    "memory, by many": (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = b'x' * (40 << 20)\n"
        "        time.sleep(60)\ntime.sleep(60)\n",
        "out of memory",
    ),
    "memory, in an answer": ("def f(x): return 'x' * (100 << 20)\n", "out of memory|MemoryError"),
    "an endless loop": ("while True: pass\n", "timed out after"),
    "endless loops, by many": (
        "import os\nfor _ in range(3): os.fork()\nwhile True: pass\n",
        "timed out after",
    ),
    "an endless loop when called": ("def f(x):\n    while True: pass\n", "timed out after"),
    "a loop that catches all": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass\n",
        "timed out after",
    ),
    "sleep": ("import time\ntime.sleep(60)\n", "timed out after 6 s"),
    "sleep, all descriptors closed": (
        "import os, time\nos.closerange(0, 100)\ntime.sleep(60)\n",
        "timed out after 6 s",
    ),
    "endless output": ("while True: print('x' * 999)\n", "too much output"),
    "the end, on loading": ("import os\nos._exit(0)\n", "ended with code 0 before its tests did"),
    "the end, when called": ("import os\ndef f(x): os._exit(0)\n", "ended with code 0 before its tests did"),
    "sys.exit": ("import sys\nsys.exit(0)\n", "SystemExit"),
    "sys.exit when called": ("import sys\ndef f(x): sys.exit(0)\n", "SystemExit"),
    "a signal to itself": ("import os\nos.kill(os.getpid(), 11)\n", "killed by SIGSEGV"),
    "a huge file": (
        "def f(x):\n    with open('x', 'wb') as file:\n        file.write(b'x' * (3 << 20))\n    return 2\n",
        "File too large",
    ),
    "many files": (
        "def f(x):\n    for n in range(4):\n        open(str(n), 'wb').write(b'x' * (2 << 20))\n    return 2\n",
        "No space left",
    ),
    "a million files": (
        "def f(x):\n    for n in range(40000): open(str(n), 'w').close()\n    return 2\n",
        "No space left|too much on disk",
    ),
    "no program": ("def f(x:\n", "failed: SyntaxError"),
    "another function": ("def g(x): return 2\n", "failed: NameError: name 'f' is not defined"),
}
FAKED = {
    "'passed' on every descriptor": (
        "import os\nfor n in range(64):\n    try:\n        os.write(n, b'\"passed\"\\n' * 3)\n"
        "    except OSError:\n        pass\ndef f(x): return 1\n"
    ),
    "an object that equals all": (
        "class A:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    def __bool__(self): return True\ndef f(x): return A()\n"
    ),
    "a number that equals all": (
        "class A(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def f(x): return A(1)\n"
    ),
    "a list that equals all": (
        "class A(list):\n    def __eq__(self, other): return True\ndef f(x): return A()\n"
    ),
    "patched builtins": (
        "import builtins\nbuiltins.AssertionError = type(None)\nbuiltins.isinstance = lambda *x: True\n"
        "builtins.compile = builtins.exec = print\ndef f(x): return 1\n"
    ),
    "patched json": ("import json\njson.dumps = lambda *x, **y: '[\"passed\"]'\ndef f(x): return 1\n"),
    "frames": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    for space in (frame.f_globals, frame.f_locals):\n"
        "        space.update(tests='', passed=True, reply=['value', 2])\n    frame = frame.f_back\n"
        "def f(x): return 1\n"
    ),
    "an answer of an unknown kind": (
        "import os, sys\nos.write(int(sys.argv[3]), b'{\"passed\": true}\\n[1]\\n')\ndef f(x): return 1\n"
    ),
    "an answer nested deep": "def f(x):\n    x = []\n    for _ in range(5000): x = [x]\n    return x\n",
}
ATTACKS = {
    "reading outside": (
        "def f(x):\n    for path in ('{outside}/secret', '/etc/shadow', '/proc/1/environ', '/proc/1/mem',\n"
        "                 '/proc/1/root/etc/shadow', '/proc/self/root{outside}/secret', '/proc/kcore'):\n"
        "        try:\n            if open(path, 'rb').read(1 << 12): return 2\n"
        "        except OSError:\n            pass\n"
    ),
    "our environment": (
        "import os\ndef f(x):\n    found = str(dict(os.environ))\n    for pid in os.listdir('/proc'):\n"
        "        try:\n            found += open('/proc/' + pid + '/environ').read()\n"
        "        except OSError:\n            pass\n    return 2 if '{secret}' in found else 1\n"
    ),
    "the place of the project": (  # the guard's command line, and what bubblewrap mounted, named it
        "import os\ndef f(x):\n    seen = ''\n    for pid in os.listdir('/proc'):\n"
        "        for name in ('cmdline', 'mountinfo', 'mounts', 'mountstats', 'cgroup', 'environ', 'maps'):\n"
        "            try:\n                seen += open(f'/proc/{pid}/{name}').read()\n"
        "            except OSError:\n                pass\n"
        "        for name in ('cwd', 'exe', 'root'):\n            try:\n"
        "                seen += os.readlink(f'/proc/{pid}/{name}')\n            except OSError:\n"
        "                pass\n    return 2 if '{project}' in seen or '{cgroup}' in seen else 1\n"
    ),
    "our report": (  # through bubblewrap's first process, which had the guard's output: an evaluation ended in
        # a traceback
        "import os\ndef f(x):\n    for pid in (1, os.getppid()):\n        for n in range(64):\n"
        "            try:\n"
        "                os.write(os.open(f'/proc/{pid}/fd/{n}', os.O_WRONLY), b'{}\\n')\n"
        "            except OSError:\n                pass\n    return 1\n"
    ),
    "our processes": (
        "import os\ndef f(x):\n    seen = [pid for pid in os.listdir('/proc') if pid.isdigit()]\n"
        "    return 2 if len(seen) > 3 else 1\n"
    ),
    "writing outside": (
        "def f(x):\n    for path in ('{outside}/mine', '/mine', '/usr/mine', '/etc/passwd', '/players/job',\n"
        "                 '/dev/mine', '/proc/sys/kernel/hostname'):\n"
        "        try:\n            open(path, 'w').write('x')\n            return 2\n"
        "        except OSError:\n            pass\n"
    ),
    "links to the outside": (
        "import os\ndef f(x):\n    os.symlink('{outside}/secret', 'x')\n    try:\n"
        "        os.link('/etc/passwd', 'y')\n        return 2\n    except OSError:\n        pass\n"
        "    return 2 if os.path.exists('x') else 1\n"
    ),
    "the network": (
        "import socket, urllib.request\ndef f(x):\n    for ask in (\n"
        "        lambda: socket.create_connection(('127.0.0.1', {port}), 1),\n"
        "        lambda: urllib.request.urlopen('http://127.0.0.1:{port}', timeout=1),\n"
        "        lambda: socket.socket(socket.AF_UNIX), lambda: socket.socket(socket.AF_NETLINK)):\n"
        "        try:\n            ask()\n            return 2\n        except OSError:\n            pass\n"
    ),
    "rights": (
        "import os\ndef f(x):\n    for act in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0),\n"
        "                lambda: os.setgroups([0]), lambda: os.chown('.', 0, 0), lambda: os.nice(-1),\n"
        "                lambda: os.chroot('.')):\n"
        "        try:\n            act()\n            return 2\n        except OSError:\n            pass\n"
    ),
    "higher limits": (
        "import resource\ndef f(x):\n    for name in ('AS', 'NPROC', 'FSIZE', 'CPU', 'NOFILE'):\n"
        "        kind = getattr(resource, 'RLIMIT_' + name)\n        for value in (-1, 1 << 50):\n"
        "            try:\n                resource.setrlimit(kind, (value, value))\n                return 2\n"
        "            except (OSError, ValueError):\n                pass\n"
    ),
    "calls of the kernel": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\ndef f(x):\n"
        "    calls = [lambda: libc.ptrace(16, 1, 0, 0), lambda: libc.ptrace(0, 0, 0, 0),\n"
        "             lambda: libc.unshare(0x10000000), lambda: libc.unshare(0x20000),\n"
        "             lambda: libc.mount(b'none', b'/box', b'tmpfs', 0, None), lambda: libc.umount(b'/box'),\n"
        "             lambda: libc.memfd_create(b'x', 0), lambda: libc.shmget(0, 1 << 20, 0o1600),\n"
        "             lambda: libc.setns(0, 0), lambda: libc.syscall(321, 0, 0, 0),\n"
        "             lambda: libc.prlimit(1, 7, 0, ctypes.create_string_buffer(16)),\n"
        "             lambda: libc.vmsplice(1, 0, 0, 0), lambda: libc.splice(0, 0, 1, 0, 0, 0)]\n"
        "    return 2 if any(call() >= 0 for call in calls) else 1\n"
    ),
    "another's end": (  # no memory left, and all others were ended for a program that could not be
        "def f(x):\n    try:\n        open('/proc/self/oom_score_adj', 'w').write('-1')\n        return 2\n"
        "    except OSError:\n        pass\n"
    ),
    "our life": (
        "import os, signal\ndef f(x):\n    for pid in (os.getppid(), 1, -1):\n        try:\n"
        "            os.kill(pid, signal.SIGKILL)\n        except OSError:\n            pass\n    return 1\n"
    ),
    "its group's life": "import os, signal\ndef f(x):\n    os.killpg(0, signal.SIGKILL)\n    return 1\n",
    "a daemon": (
        "import os, time\ndef f(x):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            os.closerange(0, 100)\n            time.sleep(60)\n        os._exit(0)\n    return 1\n"
    ),
}


def players() -> set[int]:
    """The processes of programs that live."""
    result = set()
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and b"players.py" in Path(entry.path, "cmdline").read_bytes():
                result.add(int(entry.name))
        except OSError:
            continue
    return result


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return open_sandbox(LIMITS)
    except UserError as error:
        pytest.skip(f"nothing confines programs here: {error}")


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside")
    folder.chmod(0o777)
    for parent in (folder.parent, folder.parent.parent):
        parent.chmod(0o755)
    (folder / "secret").write_text(SECRET)
    return folder


@pytest.fixture(scope="module")
def visits() -> Iterator[tuple[int, list[str]]]:
    """A server of ours, and who came."""
    came: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                while True:
                    came.append(str(server.accept()[1]))
            except OSError:
                return

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], came
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def verdicts(sandbox: Sandbox, outside: Path, visits: tuple[int, list[str]]) -> dict[str, Verdict]:
    """All of them, several at a time, since many only wait."""
    os.environ["ADAPTIVE_SECRET"] = SECRET
    sources = {name: source for name, (source, _) in ENDED.items()} | FAKED
    for name, source in ATTACKS.items():
        marks = {
            "outside": outside,
            "secret": SECRET,
            "port": visits[0],
            "project": PROJECT,
            "cgroup": OWN_CGROUP,
        }
        for mark, value in marks.items():
            source = source.replace(f"{{{mark}}}", str(value))
        sources[name] = source
    programs = [Program("python", source, TESTS) for source in sources.values()]
    result = dict(zip(sources, sandbox.judge_all(programs, workers=4), strict=True))
    del os.environ["ADAPTIVE_SECRET"]
    return result


@pytest.mark.parametrize("name", ENDED)
def test_excess_is_ended_and_named(verdicts: dict[str, Verdict], name: str) -> None:
    assert not verdicts[name].passed
    assert re.search(ENDED[name][1], verdicts[name].reason), verdicts[name]


@pytest.mark.parametrize("name", [*FAKED, *ATTACKS])
def test_a_fake_or_an_attack_fails(verdicts: dict[str, Verdict], name: str) -> None:
    """By the tests' own word: a program that does not even run would not pass either."""
    assert not verdicts[name].passed, verdicts[name]
    assert re.search("AssertionError|RecursionError|answer|killed|ended|gone", verdicts[name].reason), verdicts[
        name
    ]


def test_the_machine_is_unharmed(
    verdicts: dict[str, Verdict], outside: Path, visits: tuple[int, list[str]]
) -> None:
    left, deadline = players(), time.monotonic() + 10
    while left & players() and time.monotonic() < deadline:  # other runs on this machine may have theirs
        time.sleep(0.05)
    assert not left & players(), "processes were left"
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == SECRET and not Path("/mine").exists()
    assert not visits[1], "a program reached the network"


def test_attacks_end_as_wrong_answers(verdicts: dict[str, Verdict]) -> None:
    """Those that only try what is refused live to answer, and none of them gets at what it tries."""
    quiet = set(ATTACKS) - {"our life", "its group's life"}
    assert {name: verdicts[name].reason for name in quiet} == dict.fromkeys(quiet, "failed: AssertionError")


def test_tests_that_expect_an_exception_do_not_take_the_end_for_one(sandbox: Sandbox) -> None:
    tests = "try:\n    f(1)\nexcept Exception:\n    pass\n"
    assert sandbox.judge(Program("python", "def f(x): raise ValueError", tests)).passed
    assert not sandbox.judge(Program("python", "import os\ndef f(x): os._exit(0)", tests)).passed


def test_what_the_tests_compare_with_cannot_be_redefined(sandbox: Sandbox) -> None:
    source = "def abs(x): return 0\ndef helper(x): return 0\ndef f(x): return 9\n"
    tests = "assert abs(f(1) - 2) < 0.1"
    assert not sandbox.judge(Program("python", source, tests)).passed
    tests, known = "assert helper(f(1)) == 0", "def helper(x):\n    return x\n"
    assert not sandbox.judge(Program("python", source, tests, known)).passed
