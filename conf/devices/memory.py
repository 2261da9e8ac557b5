"""Measure the free memory of this machine, check that a model fits, and keep freed memory for reuse."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from conf.errors import MEMORY, UserError

GIB = 2**30
# Parameters of glibc's mallopt (malloc.h).
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
#: If one of these variables is set, the user's choice holds and `reuse_freed_memory` does nothing.
OWN_CHOICE = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)


def reuse_freed_memory() -> None:
    """Let malloc keep what this process frees, for its next allocations.

    By default glibc returns large blocks to the system. Then the activations of each training step on a CPU
    are new pages, which the system has to clear: about a tenth of a step's time for SmolLM2-135M. No-op
    with another C library.
    """
    library = ctypes.CDLL(None)
    if any(name in os.environ for name in OWN_CHOICE) or not hasattr(
        library, "mallopt"
    ):
        return
    library.mallopt(M_MMAP_MAX, 0)
    library.mallopt(M_TRIM_THRESHOLD, -1)
    library.mallopt(M_TOP_PAD, 64 * 2**20)


def machine_memory(*, swap: bool = False, root: Path = Path("/")) -> tuple[int, int]:
    """Return the free and total bytes of this machine, within the limits of this process's control groups.

    The order is that of torch.cuda.mem_get_info. File caches count as free. With `swap`, free swap counts too,
    since other programs can be moved there.
    """
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for folder in _control_groups(root):
        if limits := _read_limits(folder):
            limit, used = limits
            total = min(total, limit)
            free = min(free, max(0, limit - used))
    if swap:
        free = min(total, free + psutil.swap_memory().free)
    return free, total


def check_fits(
    purpose: str, needed: float, memory: tuple[float, float], holder: str, cure: str
) -> None:
    """Raise UserError with the message of `describe_shortage` if the memory does not suffice."""
    if sentence := describe_shortage(purpose, needed, memory, holder, cure):
        raise UserError(sentence, page=MEMORY)


def describe_shortage(
    purpose: str, needed: float, memory: tuple[float, float], holder: str, cure: str
) -> str | None:
    """Return an error message if `needed` bytes exceed the free bytes of `memory`, (free, total); else None.

    The message has the `purpose`, the figures in GiB, the `holder` of the memory (machine or GPU), and the
    `cure`.
    """
    free, total = memory
    if needed <= free:
        return None
    if needed <= total:
        cure = f"end other programs or {cure}"
    return (
        f"memory must suffice for {purpose}: {needed / GIB:.1f} GiB are needed, got "
        f"{free / GIB:.1f} GiB free of the {total / GIB:.1f} GiB of this {holder}. "
        f"{cure[0].upper()}{cure[1:]}"
    )


def _control_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups (cgroup v1 and v2) and of their parents.

    In a container the path in /proc may be the host's; then the root of the mount is the container's group.
    """
    listing = root / "proc/self/cgroup"
    mount = root / "sys/fs/cgroup"
    for line in listing.read_text().splitlines() if listing.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = mount / controllers
            group = top / path.lstrip("/")
            yield from (group, *group.parents[: len(group.parts) - len(top.parts)])


def _read_limits(group: Path) -> tuple[int, int] | None:
    """Return a group's memory limit and its bytes in use without file caches; None without a limit."""
    for limit_name, usage_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            limit = (group / limit_name).read_text().strip()
            if limit == "max":
                return None
            used = int((group / usage_name).read_text())
            statistics = (group / "memory.stat").read_text().splitlines()
        except OSError:
            continue
        sizes = {name: int(size) for name, size in map(str.split, statistics)}
        caches = (f"{prefix}inactive_file", f"{prefix}active_file")
        return int(limit), used - sum(sizes.get(name, 0) for name in caches)
    return None
