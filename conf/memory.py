"""The memory of this machine that is free, and the refusal of a model that does not fit."""

from collections.abc import Iterator
from pathlib import Path

import psutil

from conf.errors import MEMORY, UserError

GIB = 2**30


def machine_memory(*, swap: bool = False, root: Path = Path("/")) -> tuple[int, int]:
    """Return the free and total bytes of this machine, within the limits of this process's control groups.

    The same order as torch.cuda.mem_get_info. Caches of files count as free, and with `swap` also the swap that
    is free, since other programs can be moved there.
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
    """Raise UserError with the sentence of `describe_shortage`, if there is one."""
    if sentence := describe_shortage(purpose, needed, memory, holder, cure):
        raise UserError(sentence, page=MEMORY)


def describe_shortage(
    purpose: str, needed: float, memory: tuple[float, float], holder: str, cure: str
) -> str | None:
    """Return a sentence if `needed` bytes are more than are free, of (free, total) `memory`; else None.

    It names `purpose`, both figures, the `holder` of the memory, and the `cure`.
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
    """Yield the folders of this process's groups and of those above them, of both versions of control groups.

    In a container the named path can be the host's; the mount's root is the container's group then.
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
    """Return the limit of a group and the bytes in use without caches of files; None for no limit."""
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
