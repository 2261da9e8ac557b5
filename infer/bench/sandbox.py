"""Untrusted Python programs: run beside their tests in bubblewrap, and judged.

A program sees a read-only /usr, Python's standard library and an empty working folder in memory. It has no
network, no environment, no other processes and, started by root, a user id of its own. prlimit bounds memory,
CPU seconds, processes and files; the sum of all processes' memory is bounded by memory * processes only.

A program passes if its tests printed a random token after their last line: `sys.exit(0)`, `os._exit(0)` and a
printed "passed" fail. Program and tests share a process, as in HumanEval's own harness, so a program written
against this file can still cheat: it can find the token in memory, redefine what the tests compare with, or
return an object that equals everything.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import IO, NamedTuple

MIB = 1 << 20
OUTPUT_TAIL = 1 << 16  # bytes
TIME_LIMIT_SIGNAL = 24  # SIGXCPU
FIRST_USER = 20_000  # user ids of programs that root starts
USERS = 20_000
_numbers = count(os.getpid() * 64)

# stdin holds the job; the program itself reads an empty one.
DRIVER = """
import json, os, sys, types
job = json.loads(sys.stdin.buffer.read())
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
module = sys.modules["solution"] = types.ModuleType("solution")
exec(compile(job["source"], "solution.py", "exec"), module.__dict__)
exec(compile(job["tests"], "tests.py", "exec"), module.__dict__)
sys.stdout.flush()
os.write(1, job["token"].encode())
"""


@dataclass(frozen=True)
class ProgramLimits:
    """What a program may use."""

    cpu_seconds: int = 10
    wall_seconds: float = 30.0
    memory: int = 1024  # MiB of address space, for each process
    processes: int = 8
    file: int = 16  # MiB of a file and of the output; the working folder holds four times as much


class Verdict(NamedTuple):
    """`result` is passed, failed, timed out or out of memory; `message` is the last line of stderr."""

    result: str
    message: str = ""

    @property
    def passed(self) -> bool:
        """True if the tests ran to their end."""
        return self.result == "passed"


def judge(source: str, tests: str, limits: ProgramLimits | None = None) -> Verdict:
    """Run a program and then its tests in one process, and return the verdict."""
    limits = limits or ProgramLimits()
    token = secrets.token_hex(16)
    job = json.dumps({"source": source, "tests": tests, "token": token})
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        # start_new_session: Ctrl-C is the caller's, and bwrap dies with its parent.
        process = subprocess.Popen(
            command(limits),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            env={
                "LANG": "C.UTF-8",
                "LD_LIBRARY_PATH": "/python/lib",
                "PATH": "/usr/bin:/bin",
            },
            start_new_session=True,
        )
        try:
            process.communicate(job.encode(), timeout=limits.wall_seconds)
        except subprocess.TimeoutExpired:
            return Verdict("timed out", f"after {limits.wall_seconds:g} s")
        finally:
            process.kill()
            process.wait()
        lines = _tail(errors).strip().splitlines()
        message = (
            lines[-1][:200]
            if lines
            else f"exit code {process.returncode} before the end of the tests"
        )
        if process.returncode == 128 + TIME_LIMIT_SIGNAL:
            return Verdict("timed out", f"after {limits.cpu_seconds} s of CPU time")
        if process.returncode == 0 and token in _tail(output):
            return Verdict("passed")
        return Verdict(
            "out of memory" if message.startswith("MemoryError") else "failed", message
        )


@cache
def unavailable() -> str:
    """Return why programs cannot be judged on this machine, in a sentence; empty if they can."""
    missing = [
        name for name in ("bwrap", "prlimit", "setpriv") if not shutil.which(name)
    ]
    if "bwrap" in missing:
        return "Programs cannot be judged without bwrap. Install bubblewrap (apt-get install bubblewrap)."
    if missing:
        return f"Programs cannot be judged without {missing[0]}. Install it (apt-get install util-linux)."
    verdict = judge("", "")
    if verdict.passed:
        return ""
    return (
        f"Programs cannot be judged: bwrap must create namespaces here, got {verdict.message!r}. Allow user "
        "namespaces, or install bubblewrap 0.7 or newer (apt-get install bubblewrap)."
    )


def command(limits: ProgramLimits) -> list[str]:
    """Return the command that reads a job from stdin and runs it confined."""
    words = [
        "bwrap",
        "--unshare-net",
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    words += [
        "--die-with-parent",
        "--new-session",
        "--hostname",
        "sandbox",
        "--cap-drop",
        "ALL",
    ]
    words += ["--ro-bind", "/usr", "/usr"]
    for link in ("/bin", "/lib", "/lib64"):
        words += (
            ["--symlink", f"usr{link}", link]
            if Path(link).is_symlink()
            else ["--ro-bind-try", link, link]
        )
    words += ["--ro-bind", sys.base_prefix, "/python"]
    words += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--perms",
        "1777",
        "--size",
        str(4 * limits.file * MIB),
    ]
    words += ["--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
    if os.geteuid() == 0:  # the kernel holds root to no number of processes
        user = str(FIRST_USER + next(_numbers) % USERS)
        words += [
            "--cap-add",
            "CAP_SETUID",
            "--cap-add",
            "CAP_SETGID",
            "setpriv",
            "--inh-caps=-all",
        ]
        words += ["--reuid", user, "--regid", user, "--clear-groups"]
    else:
        words += ["--unshare-user"]
    words += [
        "prlimit",
        f"--as={limits.memory * MIB}",
        f"--cpu={limits.cpu_seconds}:{limits.cpu_seconds + 1}",
    ]
    words += [
        f"--nproc={limits.processes}",
        f"--fsize={limits.file * MIB}",
        "--core=0",
        "--nofile=128",
    ]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [*words, f"/python/bin/python{version}", "-I", "-S", "-B", "-c", DRIVER]


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - OUTPUT_TAIL))
    return file.read().decode(errors="replace")
