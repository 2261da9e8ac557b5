"""A memory cgroup for one room: the kernel itself holds the limit there, for all kinds of memory.

Beside the pages of processes it counts what no process shows: shared memory without a mapping, files in memory,
buffers of sockets and pipes, page tables. Version 1 and 2 differ in the names of files. Most containers and
users have no cgroup that they may write to: then `watch` counts what it can see.
"""

import os
import time
from contextlib import suppress
from typing import NamedTuple

PREFIX = "adaptive-sandbox-"
PATIENCE = 2.0  # seconds until a cgroup whose processes have ended can be removed


class _Files(NamedTuple):
    """Names in one version; `swap` counts pages on the swap device, in version 1 together with memory."""

    limit: str
    swap: str
    events: str


_VERSIONS = (
    _Files("memory.max", "memory.swap.max", "memory.events"),
    _Files("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control"),
)


def parents() -> list[str]:
    """Return the cgroups below which this process may try to make more: its own, or in version 2 the one above.

    Version 2 lets a cgroup either hold processes or pass controllers on to its children.
    """
    own = own_cgroups()
    above = [os.path.dirname(path) for path in own if _passes_memory_on(os.path.dirname(path))]
    usable = [path for path in own if _is_version_1(path) or _passes_memory_on(path)]
    return [path for path in (*usable, *above) if os.access(path, os.W_OK)]


def own_cgroups(process: str = "/proc/self") -> list[str]:
    """Return the folders of a process's memory cgroups, as far as they are mounted."""
    with open(f"{process}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounts = [line.split() for line in file if " - cgroup" in line]
    with open(f"{process}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        memberships = [line.rstrip("\n").split(":", 2) for line in file]
    paths = []
    for _, controllers, path in memberships:
        kind = "cgroup" if controllers else "cgroup2"
        for fields in mounts:
            options = fields[-1].split(",")
            if fields[fields.index("-") + 1] != kind or kind == "cgroup" and "memory" not in options:
                continue
            root, mount = fields[3].rstrip("/"), fields[4]
            if (not controllers or "memory" in controllers.split(",")) and f"{path}/".startswith(f"{root}/"):
                paths.append((mount + path.removeprefix(root)).rstrip("/"))
    return paths


def _is_version_1(path: str) -> bool:
    return os.path.exists(f"{path}/{_VERSIONS[1].limit}")


def _passes_memory_on(path: str) -> bool:
    try:
        return "memory" in _read(f"{path}/cgroup.subtree_control").split()
    except OSError:
        return False


def create(parent: str, memory_bytes: int) -> str:
    """Make a cgroup with this limit and return its folder. Raises OSError where the kernel refuses it."""
    _remove_stale(parent)
    folder = f"{parent}/{PREFIX}{os.getpid()}"
    os.mkdir(folder)
    try:
        files = _files(folder)
        _write(f"{folder}/{files.limit}", memory_bytes)
        if os.path.exists(f"{folder}/{files.swap}"):
            _write(f"{folder}/{files.swap}", memory_bytes if files is _VERSIONS[1] else 0)
        _out_of_memory_events(folder)
    except OSError:
        os.rmdir(folder)
        raise
    return folder


def _files(folder: str) -> _Files:
    for files in _VERSIONS:
        if os.path.exists(f"{folder}/{files.limit}"):
            return files
    raise OSError(f"{folder} has no memory controller")


def enter(folder: str) -> None:
    """Move this process into a cgroup: its children start there."""
    _write(f"{folder}/cgroup.procs", 0)


def ran_out_of_memory(folder: str) -> bool:
    """Return whether the kernel has ended a process because of the limit."""
    return _out_of_memory_events(folder) > 0


def _out_of_memory_events(folder: str) -> int:
    for line in _read(f"{folder}/{_files(folder).events}").splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    raise OSError(f"{folder} does not count processes that were ended for memory")


def remove(folder: str) -> None:
    """Remove a cgroup whose processes have ended. The kernel may need a moment to see that they have."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            os.rmdir(folder)
            return
        except OSError:
            if time.monotonic() > deadline:
                return  # a later guard removes it: an empty cgroup does no harm
            time.sleep(0.01)


def _remove_stale(parent: str) -> None:
    """Remove the cgroups of guards that were killed."""
    for name in os.listdir(parent):
        if name.startswith(PREFIX) and not os.path.exists(f"/proc/{name.removeprefix(PREFIX)}"):
            with suppress(OSError):  # another guard removes it, or it belongs to another container's guard
                os.rmdir(f"{parent}/{name}")


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _write(path: str, value: int) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(str(value))
