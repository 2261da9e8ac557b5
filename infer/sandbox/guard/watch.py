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


class Usage(NamedTuple):
    """At one moment."""

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
    return Usage(sum(one.cpu_seconds for one in found), sum(one.tasks for one in found))


def _of(pid: int) -> Usage:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return Usage()
    return Usage(sum(map(int, fields[11:15])) / _TICKS, int(fields[17]))


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
