"""Limits on memory and on seconds of the CPU hold for what no living process shows."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from conf import UserError
from infer.sandbox import Program, Sandbox, SandboxConfig, open_sandbox
from infer.sandbox import sandbox as module
from infer.sandbox.guard import watch
from infer.sandbox.guard.watch import Process, ProcessorTime, tree_usage

END_OF_THREAD = {"x86_64": 60, "aarch64": 93}[os.uname().machine]  # the number of the call
# The name: the program, which passes where the limit does not hold, and the reasons that may be given.
MEMORY = {
    "shared, without a mapping": (
        """
import mmap, time
def f(x):
    block, mappings = b"x" * (1 << 20), []
    for _ in range(3):
        mappings.append(mmap.mmap(-1, 100 << 20))
        for at in range(0, 100 << 20, 1 << 20):
            mappings[-1][at : at + (1 << 20)] = block
            mappings[-1].madvise(mmap.MADV_DONTNEED, at, 1 << 20)
    time.sleep(1)
    return 2
""",
        "Operation not permitted",
    ),
    "of a device": (
        """
import mmap, os
def f(x):
    mmap.mmap(os.open("/dev/zero", os.O_RDWR), 1 << 20)
    return 2
""",
        "No such file",
    ),
    "in sockets": (
        """
import os, socket, time
def fill(pair):
    for end in pair:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
        try:
            while True:
                end.send(b"x" * 32000)
        except BlockingIOError:
            pass
def f(x):
    for _ in range(8):
        if os.fork() == 0:
            pairs = []
            try:
                while True:
                    pairs.append(socket.socketpair())
                    fill(pairs[-1])
            except OSError:
                time.sleep(60)
    time.sleep(10)
    return 2
""",
        "out of memory",
    ),
    "of a process whose first thread has ended": (
        f"""
import ctypes, os, threading, time
def hog():
    blocks = [b"x" * (1 << 20) for _ in range(150)]
    time.sleep(60)
def f(x):
    for _ in range(2):
        if os.fork() == 0:
            threading.Thread(target=hog).start()
            ctypes.CDLL(None).syscall({END_OF_THREAD}, 0)
    time.sleep(10)
    return 2
""",
        "out of memory",
    ),
    "in files": (
        """
import time
def f(x):
    for n in range(4):
        open(str(n), "wb").write(b"x" * (60 << 20))
    time.sleep(1)
    return 2
""",
        "out of memory|too much on disk",
    ),
}
SECONDS = {
    "children that nobody waits for": ("signal.signal(signal.SIGCHLD, signal.SIG_IGN)", 0.2),
    "short children that nobody waits for": ("signal.signal(signal.SIGCHLD, signal.SIG_IGN)", 0.004),
    "children that are waited for": ("", 0.004),
}
FORKING = """
import os, signal, time
%s
def f(x):
    end = time.monotonic() + 15
    while time.monotonic() < end:
        if os.fork() == 0:
            began = time.process_time()
            while time.process_time() - began < %g:
                pass
            os._exit(0)
        try:
            os.wait()
        except ChildProcessError:
            pass
    return 2
"""
# What right programs may do, beside the attacks above.
RIGHT = {
    "an event loop, a process in it": """
import asyncio
async def ask():
    process = await asyncio.create_subprocess_exec("/bin/echo", "2", stdout=asyncio.subprocess.PIPE)
    return int((await process.communicate())[0])
def f(x):
    return asyncio.run(ask())
""",
    "a shell that waits": """
import subprocess
def f(x):
    return int(subprocess.run(["/bin/sh", "-c", "sleep 0.1 & wait; echo 2"], capture_output=True).stdout)
""",
    "copies of files, a mapped file": """
import mmap, shutil
def f(x):
    open("a", "wb").write(bytes([2]) * 100000)
    shutil.copyfile("a", "b")
    with open("b", "r+b") as file:
        return mmap.mmap(file.fileno(), 0)[99999]
""",
    "a pipe between processes": """
import multiprocessing
def answer(end):
    end.send(2)
def f(x):
    multiprocessing.set_start_method("fork")
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=answer, args=(theirs,))
    process.start()
    answered = ours.recv()
    process.join()
    return answered
""",
}


@pytest.fixture(scope="module", params=["cgroup", "counted"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    config = SandboxConfig(
        wall_seconds=20, cpu_seconds=8, memory=192, processes=24, file=64, folder=256, output=0.25
    )
    patch = pytest.MonkeyPatch()
    if request.param == "counted":
        patch.setattr(module, "cgroup_parents", list)
    try:
        opened = open_sandbox(config)
    except UserError as error:
        pytest.skip(f"nothing confines programs here: {error}")
    finally:
        patch.undo()
    if ("held by a memory cgroup" in opened.description) != (request.param == "cgroup"):
        pytest.skip("no memory cgroup can be made here")
    return opened


@pytest.mark.parametrize("name", MEMORY)
def test_memory_that_no_process_shows_is_limited(sandbox: Sandbox, name: str) -> None:
    """The limit was on resident memory by /proc/PID/stat: programs had 3 GiB at a limit of 1 and passed."""
    source, reason = MEMORY[name]
    verdict = sandbox.judge(Program("python", source, "assert f(1) == 2"))
    assert not verdict.passed and re.search(reason, verdict.reason), verdict


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass_within_the_limits(sandbox: Sandbox, name: str) -> None:
    verdict = sandbox.judge(Program("python", RIGHT[name], "assert f(1) == 2"))
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", SECONDS)
def test_seconds_of_children_count_whoever_waits_for_them(name: str) -> None:
    """The kernel forgets the seconds of children whose parent ignores SIGCHLD: nothing limited them."""
    try:
        opened = open_sandbox(SandboxConfig(cpu_seconds=0.5))
    except UserError as error:
        pytest.skip(f"nothing confines programs here: {error}")
    verdict = opened.judge(Program("python", FORKING % SECONDS[name], "assert f(1) == 2"))
    assert verdict.reason == "timed out after 0.5 s of computing", verdict


def test_seconds_between_looks_are_estimated_without_bias() -> None:
    """Children of 4 ms, looked at every 20 ms on average, one after the other and never waited for."""
    clock, step, seconds, look = ProcessorTime(), 0, 0.0, 0.0
    while look < 60:
        step = (step * 7919 + 12345) % 99991  # from 0 to 40 ms
        look += 0.04 * step / 99991
        number, age = int(look / 0.004), look % 0.004
        ours = Process(1, 0, False, 0.01, 0.0, 1)
        seconds = clock.add([ours, Process(number, number, True, age, 0.0, 1)], look)
    assert seconds == pytest.approx(60, rel=0.15)


def test_seconds_that_the_kernel_knows_count_once() -> None:
    clock = ProcessorTime()
    for look in range(100):
        at = look / 10
        seconds = clock.add([Process(1, 0, True, at, 1.0, 1), Process(2, 5, False, 0.0, 0.0, 1)], at)
    assert seconds == pytest.approx(9.9 + 1.0)


@pytest.mark.parametrize(
    ("membership", "parents"),
    [
        (
            "4:memory:/a/b\n1:cpu:/c\n",
            ["memory/a/b", "memory"],
        ),  # version 1; a container sees its part as the root
        ("0::/user/me\n", ["user/me", "user"]),  # version 2
        ("1:cpu:/c\n", []),
    ],
)
def test_cgroups_are_made_below_the_own_or_beside_it(
    monkeypatch: pytest.MonkeyPatch, membership: str, parents: list[str]
) -> None:
    monkeypatch.setattr(watch, "_read_text", lambda path: membership)
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    assert watch.cgroup_parents() == [f"/sys/fs/cgroup/{parent}" for parent in parents]


def test_a_cgroup_that_cannot_be_made_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder that is no cgroup stands for a kernel that refuses: the sandbox opens, and counts."""
    monkeypatch.setattr(module, "cgroup_parents", lambda: [str(tmp_path)])
    try:
        opened = open_sandbox(SandboxConfig())
    except UserError as error:
        pytest.skip(f"nothing confines programs here: {error}")
    assert "counted" in opened.description and not list(tmp_path.iterdir())


def test_folders_nested_without_end_are_too_much(tmp_path: Path) -> None:
    """Beyond a depth of 1,000 the guard's walk ended in a RecursionError, and the evaluation with it."""
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("x" * 3, dir_fd=here)
        below = os.open("x" * 3, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        assert tree_usage(str(tmp_path)).files > 1000
    finally:  # pytest removes old folders by recursion, and a later run would end in a RecursionError
        subprocess.run(["rm", "-rf", tmp_path / "xxx"], check=True)
