"""The first process of a room: runs the steps of a job one after the other, and leaves none of their
processes behind. In a namespace of processes it is number 1, whom the others cannot harm.
"""

import fcntl
import json
import math
import os
import resource
import signal
from collections.abc import Mapping
from typing import NamedTuple

from . import kernel
from .calls import filter_code
from .job import NOBODY, PLAYERS, Job, Step
from .watch import end_all

OPEN_FILES = 256
ADDRESS_SPACE = 2  # times the memory: reserving is not using
_HIGH = 20  # descriptors are moved above this before they get the numbers that programs know


class Place(NamedTuple):
    """Where steps run, and with what."""

    box: str
    players: str
    pipes: Mapping[int, int]  # the descriptors that programs are to have, by the numbers they know
    tell: int  # where the steward writes, a line of JSON at the start of each step and at the end
    tasks: int  # the kernel's limit on the processes of their user


def run_steps(job: Job, place: Place) -> None:
    """Run them, the next only where one ended well."""
    os.chdir(place.box)
    for name, text in job.files.items():
        _write(name, text)
    code = 0
    for number, step in enumerate(job.steps):
        if number and number == len(job.steps) - 1:
            for name in job.files:
                if os.path.lexists(name):
                    os.unlink(name)
        _say(place.tell, {"step": number})
        pid = os.fork()
        if pid == 0:
            _become(job, step, place)
        code = _wait(pid)
        end_all()
        if code:
            break
    _say(place.tell, {"code": code})


def _write(name: str, text: str) -> None:
    with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)
    os.chmod(name, 0o644)


def _say(tell: int, fact: Mapping[str, int]) -> None:
    os.write(tell, json.dumps(fact).encode() + b"\n")


def _wait(pid: int) -> int:
    """Its exit code, negative for a signal; orphans are reaped meanwhile."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _become(job: Job, step: Step, place: Place) -> None:
    """Turn into the program. Does not return: what goes wrong is told on the program's error output."""
    try:
        os.setsid()
        _only(place.pipes)
        _limit(job, step, place.tasks)
        code = filter_code(signals=job.level != "limits")
        _give_up_rights(job.level)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # those that our own Python ignores
            signal.signal(number, signal.SIG_DFL)
        kernel.set_filter(code)
        command = [place.players if part == PLAYERS else part for part in step.command]
        os.execve(command[0], command, step.environment | {"HOME": os.getcwd()})
    except BaseException as error:
        os.write(2, f"{step.command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _only(pipes: Mapping[int, int]) -> None:
    """Have these descriptors under these numbers, and no others."""
    raised = {number: fcntl.fcntl(found, fcntl.F_DUPFD, _HIGH) for number, found in pipes.items()}
    os.closerange(0, _HIGH)
    for number, found in raised.items():
        os.dup2(found, number)
    os.closerange(_HIGH, os.sysconf("SC_OPEN_MAX"))


def _limit(job: Job, step: Step, tasks: int) -> None:
    limits = job.limits
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: math.ceil(limits.cpu_seconds) + 1,  # behind the guard, who counts all processes
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: tasks,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: OPEN_FILES,
    }
    if step.address_space:
        wanted[resource.RLIMIT_AS] = ADDRESS_SPACE * limits.memory_bytes
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _give_up_rights(level: str) -> None:
    root = os.getuid() == 0
    if root or level == "namespaces":  # bubblewrap has given them up already
        kernel.give_up_capabilities()
    if root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.no_new_privileges()
