"""Run an untrusted Python program and its tests in bubblewrap, and judge it.

The program sees a read-only /usr, Python's standard library and an empty working folder in
memory. It has no network, no environment variables, no other processes and no root rights.
prlimit limits the memory, CPU seconds, processes and files of each process. Memory that is not
part of a process is limited too: the folders in memory have a size, and a seccomp filter refuses
the system calls that allocate such memory.

A program passes if a random token is printed after the last line of its tests. So
`sys.exit(0)`, `os._exit(0)` and a printed "passed" fail. As in HumanEval's own harness, the
program and the tests share a process, so a program that was written to cheat can pass.
"""

import json
import os
import platform
import secrets
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from errno import ENOSYS, EPERM
from functools import cache
from itertools import count
from pathlib import Path
from typing import IO, NamedTuple

MIB = 1 << 20
OUTPUT_TAIL = 1 << 16  # bytes
CPU_TIME_EXIT_CODE = 128 + 24  # SIGXCPU
FIRST_USER = 20_000  # the first user id of programs that root starts
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
#: AUDIT_ARCH of <linux/audit.h> and the numbers of system calls, by machine.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435  # on all machines
#: Calls that allocate memory outside of the limits, or create a user namespace, where a program
#: could mount a tmpfs.
REFUSED_CALLS = {
    "memfd_create": {"x86_64": 319, "aarch64": 279},
    "memfd_secret": {"x86_64": 447, "aarch64": 447},
    "shmget": {"x86_64": 29, "aarch64": 194},
    "msgget": {"x86_64": 68, "aarch64": 186},
    "semget": {"x86_64": 64, "aarch64": 190},
    "bpf": {"x86_64": 321, "aarch64": 280},
    "unshare": {"x86_64": 272, "aarch64": 97},
    "setns": {"x86_64": 308, "aarch64": 268},
}
CLONE_NEWUSER = 0x10000000
X32_CALLS = 0x40000000  # the first number of x86_64's calls with 32-bit pointers
_user_numbers = count(os.getpid() * 64)

# The program that runs in the sandbox. It reads the job from stdin, then empties stdin.
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
    """The resource limits of a program."""

    cpu_seconds: int = 10
    wall_seconds: float = 30.0
    memory: int = 1024  # address space of each process in MiB
    processes: int = 8
    #: Size of a file in MiB; /tmp and /dev/shm have four times this size each.
    file: int = 16


class Verdict(NamedTuple):
    """The result of a program: passed, failed, timed out or out of memory, with its reason."""

    result: str
    message: str = ""

    @property
    def passed(self) -> bool:
        """True if the tests ran to their end without an error."""
        return self.result == "passed"

    def __str__(self) -> str:
        return f"{self.result}: {self.message}" if self.message else self.result


def judge(source: str, tests: str, limits: ProgramLimits = ProgramLimits()) -> Verdict:
    """Run a program and then its tests in one process, and return the verdict."""
    token = secrets.token_hex(16)
    job = json.dumps({"source": source, "tests": tests, "token": token})
    with (
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryFile() as filter,
    ):
        filter.write(call_filter(platform.machine()))
        filter.seek(0)
        process = subprocess.Popen(
            command(limits, filter.fileno()),
            executable=shutil.which("bwrap"),  # it may not be on the PATH of `env`
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            env=ENVIRONMENT,
            pass_fds=[filter.fileno()],
            start_new_session=True,  # Ctrl-C only stops the caller, and bwrap ends with it
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
            return f"judging programs needs {name}. Install bubblewrap and util-linux."
    if platform.machine() not in ARCHITECTURES:
        return (
            f"judging programs needs {' or '.join(ARCHITECTURES)}, got "
            f"{platform.machine()}. Judge the written answers on another machine."
        )
    verdict = judge("", "")
    if verdict.passed:
        return ""
    return f"bwrap must create namespaces, got {verdict.message}. Allow user namespaces on this machine."


def call_filter(machine: str) -> bytes:
    """Return the seccomp filter, a classic BPF program over struct seccomp_data.

    offset   0        4      8                     16
    field    number   arch   instruction pointer   arguments, 8 bytes each
    """
    # code, jump if true, jump if false, constant
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    refuse = (give, 0, 0, 0x50000 | EPERM)
    # Pretend that the call does not exist: the C library then uses clone, and a filter can read
    # the flags of clone.
    unknown = (give, 0, 0, 0x50000 | ENOSYS)
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, ARCHITECTURES[machine]),
        (give, 0, 0, 0x80000000),  # a call of another architecture ends the process
        (load, 0, 0, 0),
        (at_least, 0, 1, X32_CALLS),
        unknown,
        (equal, 0, 1, CLONE3),
        unknown,
    ]
    for numbers in REFUSED_CALLS.values():
        program += [(equal, 0, 1, numbers[machine]), refuse]
    program += [
        (equal, 0, 3, CLONE[machine]),
        (load, 0, 0, 16),
        (any_bit, 0, 1, CLONE_NEWUSER),
        refuse,
        (give, 0, 0, 0x7FFF0000),  # allow
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def command(limits: ProgramLimits, filter: int) -> list[str]:
    """Return the command that reads a job from stdin and runs it in the sandbox.

    `filter` is the descriptor of a file with the `call_filter`.
    """
    words = [*NAMESPACES.split(), "--seccomp", str(filter)]
    for link in ("/bin", "/lib", "/lib64"):
        if Path(link).is_symlink():
            words += ["--symlink", f"usr{link}", link]
        else:
            words += ["--ro-bind-try", link, link]
    words += ["--ro-bind", sys.base_prefix, "/python"]
    folder = 4 * limits.file * MIB
    words += ["--proc", "/proc", "--dev", "/dev"]
    for path in ("/tmp", "/dev/shm"):
        words += f"--perms 1777 --size {folder} --tmpfs {path}".split()
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    if (
        os.geteuid() == 0
    ):  # the kernel does not limit root's processes, so change the user
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
