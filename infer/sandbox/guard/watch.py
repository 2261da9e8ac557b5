"""What the processes of a program use, all together, as the kernel tells it."""

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_MEMORY = re.compile(r"^Vm(?:RSS|Swap|PTE):\s*(\d+) kB$", re.MULTILINE)
_SEND_BUFFER = 212992  # bytes, where a container does not say


class Process(NamedTuple):
    """One process at one moment."""

    pid: int
    started: int  # with the pid a name that no other process has
    running: bool  # or it has several threads, of which one may run
    own_seconds: float  # of the CPU, by its own threads
    waited_seconds: float  # by its children that ended and were waited for, and theirs
    tasks: int  # threads


class ProcessorTime:
    """The CPU seconds of all processes of a program, by two counts of which the larger holds.

    The kernel's count adds the seconds of ended children to the process that waits for them. It is exact, but
    loses children whose parent ignores SIGCHLD. So we count too what each process was seen to use from look to
    look. A process that is new and runs counts for the time since the last look: one of d seconds is seen with
    probability d / t between looks t seconds apart, and then counts for t, which is d on average. This needs
    looks at times that the program cannot foresee.
    """

    def __init__(self) -> None:
        self._seen_seconds = 0.0
        self._before: dict[tuple[int, int], float] = {}
        self._looked: float | None = None
        self._processors = len(os.sched_getaffinity(0))

    def add(self, processes: list[Process], now: float) -> float:
        """Return the seconds so far, with what a look at time `now` shows."""
        elapsed = 0.0 if self._looked is None else now - self._looked
        fresh = 0
        for process in processes:
            before = self._before.get((process.pid, process.started))
            if before is not None:
                self._seen_seconds += process.own_seconds - before
            elif process.running:
                fresh += 1
        self._seen_seconds += min(fresh, self._processors) * elapsed
        self._before = {(process.pid, process.started): process.own_seconds for process in processes}
        self._looked = now
        kernels = sum(process.own_seconds + process.waited_seconds for process in processes)
        return max(kernels, self._seen_seconds)


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


def look(pids: list[int]) -> list[Process]:
    """Return the processes of these numbers that have not ended."""
    return [process for process in map(_process, pids) if process]


def _process(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    own, waited = (sum(map(int, fields[start : start + 2])) / _TICKS for start in (10, 12))
    tasks = int(fields[16])
    return Process(pid, int(fields[18]), state == "R" or tasks > 1, own, waited, tasks)


def memory(pids: list[int]) -> int:
    """Return the bytes of processes: resident, swapped, and the page tables. A page that they share is counted
    for each.
    """
    return sum(_memory_of(pid) for pid in pids)


def _memory_of(pid: int) -> int:
    try:
        sizes = _sizes(f"/proc/{pid}/status")
        if not sizes:  # the first thread has ended: the others have the memory, if there are any
            threads = [f"/proc/{pid}/task/{thread}/status" for thread in os.listdir(f"/proc/{pid}/task")]
            sizes = next(filter(None, map(_sizes, threads)), [])
    except OSError:  # it ended while it was read
        return 0
    return sum(sizes) << 10


def _sizes(path: str) -> list[int]:
    with open(path, encoding="utf-8", errors="replace") as file:
        return [int(size) for size in _MEMORY.findall(file.read())]


def socket_memory(pid: int) -> int:
    """Return the bytes that the sockets in a process's network namespace can hold.

    A socket takes a message as long as there is less than the buffer's size in it: at most twice that size.
    """
    try:
        with open(f"/proc/{pid}/net/sockstat", encoding="utf-8") as file:
            count = int(file.readline().split()[-1])  # "sockets: used 2"
    except OSError:  # the process has ended
        return 0
    return count * 2 * _send_buffer()


def _send_buffer() -> int:
    try:
        with open("/proc/sys/net/core/wmem_default", encoding="utf-8") as file:
            return int(file.read())
    except FileNotFoundError:
        return _SEND_BUFFER


class FolderUsage(NamedTuple):
    """Of a file system."""

    size_bytes: int = 0
    files: int = 0


def folder_usage(pids: Iterable[int], path: str) -> FolderUsage:
    """Return what the file system at a path in the processes' view of the machine holds."""
    for pid in pids:
        try:
            status = os.statvfs(f"/proc/{pid}/root{path}")
        except OSError:  # the process has ended, or may not be looked into: the next has the same view
            continue
        size = (status.f_blocks - status.f_bfree) * status.f_frsize
        return FolderUsage(size, status.f_files - status.f_ffree)
    return FolderUsage()


def tree_usage(path: str) -> FolderUsage:
    """Return what lies below a folder. One whose name is too long to be read counts as more than enough."""
    size, files, folders = 0, 0, [path]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return FolderUsage(sys.maxsize, sys.maxsize)
            continue  # it is gone, or its owner has closed it
        for entry in entries:
            try:
                size += entry.stat(follow_symlinks=False).st_blocks * 512
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    return FolderUsage(sys.maxsize, sys.maxsize)
                continue
            files += 1
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
    return FolderUsage(size, files)


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
