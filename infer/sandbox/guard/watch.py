"""What the processes of a program use, all together, as the kernel tells it."""

import os
import signal
import time
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """At one moment."""

    memory_bytes: int = 0  # resident; a page that processes share is counted for each
    cpu_seconds: float = 0.0  # of those that live, and of those that ended and were waited for
    tasks: int = 0  # processes and threads


def children(pid: int) -> list[int]:
    """Those of a process, by all its threads; none of one that has ended."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="utf-8") as file:
                found += map(int, file.read().split())
    except OSError:  # it ended while it was read
        pass
    return found


def descendants(pid: int) -> list[int]:
    """All below a process, parents first."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def usage(pids: list[int]) -> Usage:
    """The sum over processes; those that have ended count nothing."""
    found = [_of(pid) for pid in pids]
    return Usage(
        sum(one.memory_bytes for one in found),
        sum(one.cpu_seconds for one in found),
        sum(one.tasks for one in found),
    )


def _of(pid: int) -> Usage:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return Usage()
    return Usage(int(fields[21]) * _PAGE, sum(map(int, fields[11:15])) / _TICKS, int(fields[17]))


def kill(pids: list[int]) -> None:
    """End processes at once; those that have ended already are passed over."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def end_all() -> None:
    """No descendant survives, whatever it called itself or whose child it made itself: this process is one
    that orphans come to.
    """
    while True:
        kill([-1] if os.getpid() == 1 else descendants(os.getpid()))
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.001)


def tasks_of_user(user: int) -> int:
    """Processes and threads of a user on the whole machine, which is what the kernel's limit counts."""
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == user:
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
            except OSError:
                continue
    return count
