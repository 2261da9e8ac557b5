"""Run an untrusted Python program and its tests in bubblewrap, and judge it.

The program sees a read-only /usr, Python's standard library and an empty working folder in
memory. It has no network, no environment, no other processes and no root rights. prlimit
bounds memory, CPU seconds, processes and files of each process.

A program passes if the random token behind the last line of its tests is printed, so that
`sys.exit(0)`, `os._exit(0)` and a printed "passed" fail. Program and tests share a process, as
in HumanEval's own harness: a program that is written against this one can cheat.
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
CPU_TIME_EXIT_CODE = 128 + 24  # SIGXCPU
FIRST_USER = 20_000  # user ids of programs, if root starts them
USERS = 20_000
NAMESPACES = (
    "bwrap --unshare-net --unshare-pid --unshare-ipc --unshare-uts --unshare-cgroup-try "
    "--die-with-parent --new-session --hostname sandbox --cap-drop ALL --ro-bind /usr /usr"
)
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": "/python/lib",
    "PATH": "/usr/bin:/bin",
}
_user_numbers = count(os.getpid() * 64)

# The job comes by stdin; the program's own stdin is empty.
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
    """The limits of a program."""

    cpu_seconds: int = 10
    wall_seconds: float = 30.0
    memory: int = 1024  # MiB of address space of each process
    processes: int = 8
    file: int = 16  # MiB of a file; the working folder holds four times as much


class Verdict(NamedTuple):
    """`result` is passed, failed, timed out or out of memory; `message` says why."""

    result: str
    message: str = ""

    @property
    def passed(self) -> bool:
        """True if the tests ran to their end."""
        return self.result == "passed"

    def __str__(self) -> str:
        return f"{self.result}: {self.message}" if self.message else self.result


def judge(source: str, tests: str, limits: ProgramLimits = ProgramLimits()) -> Verdict:
    """Run a program and then its tests in one process, and return the verdict."""
    token = secrets.token_hex(16)
    job = json.dumps({"source": source, "tests": tests, "token": token})
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command(limits),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            env=ENVIRONMENT,
            start_new_session=True,  # Ctrl-C is for the caller; bwrap dies with it
        )
        try:
            process.communicate(job.encode(), timeout=limits.wall_seconds)
        except subprocess.TimeoutExpired:
            return Verdict("timed out", f"after {limits.wall_seconds:g} s")
        finally:
            process.kill()
            process.wait()
        if process.returncode == CPU_TIME_EXIT_CODE:
            return Verdict("timed out", f"after {limits.cpu_seconds} s of CPU time")
        if process.returncode == 0 and token in _tail(output):
            return Verdict("passed")
        lines = _tail(errors).strip().splitlines() or [
            f"exit code {process.returncode} before the end of the tests"
        ]
    is_memory = lines[-1].startswith("MemoryError")
    return Verdict("out of memory" if is_memory else "failed", lines[-1][:200])


@cache
def unavailable() -> str:
    """Return why programs cannot be judged on this machine; empty if they can."""
    for name in ("bwrap", "prlimit", "setpriv"):
        if not shutil.which(name):
            return f"programs cannot be judged without {name}. Install bubblewrap and util-linux."
    verdict = judge("", "")
    if verdict.passed:
        return ""
    return f"bwrap must create namespaces, got {verdict.message}. Allow user namespaces on this machine."


def command(limits: ProgramLimits) -> list[str]:
    """Return the command that reads a job from stdin and runs it in the sandbox."""
    words = NAMESPACES.split()
    for link in ("/bin", "/lib", "/lib64"):
        if Path(link).is_symlink():
            words += ["--symlink", f"usr{link}", link]
        else:
            words += ["--ro-bind-try", link, link]
    words += ["--ro-bind", sys.base_prefix, "/python"]
    folder = 4 * limits.file * MIB
    words += (
        f"--proc /proc --dev /dev --perms 1777 --size {folder} --tmpfs /tmp".split()
    )
    words += ["--remount-ro", "/", "--chdir", "/tmp"]
    if os.geteuid() == 0:  # the kernel does not limit the number of root's processes
        user = FIRST_USER + next(_user_numbers) % USERS
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "setpriv"]
        words += f"--inh-caps=-all --reuid {user} --regid {user} --clear-groups".split()
    else:
        words += ["--unshare-user"]
    words += [
        "prlimit",
        f"--as={limits.memory * MIB}",
        f"--cpu={limits.cpu_seconds}:{limits.cpu_seconds + 1}",
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
