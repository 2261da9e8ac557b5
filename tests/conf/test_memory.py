"""Free memory within control groups, and the message if a model does not fit."""

import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.devices import memory
from conf.devices.memory import GIB, check_fits, machine_memory
from conf.errors import UserError

VERSION_2 = ("memory.max", "memory.current", "")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def write_group(
    folder: Path, names: tuple[str, str, str], limit: object, used: int, cache: int
) -> None:
    """Write a control group's files, sizes in GiB; half of the cache is inactive, half active."""
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, usage_name, prefix = names
    given = limit if isinstance(limit, str) else limit * GIB
    (folder / limit_name).write_text(f"{given}\n")
    (folder / usage_name).write_text(f"{used * GIB}\n")
    half = cache * GIB // 2
    lines = [f"anon {used * GIB}", f"{prefix}inactive_file {half}"]
    text = "\n".join([*lines, f"{prefix}active_file {half}"])
    (folder / "memory.stat").write_text(text + "\n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 24 GiB, 20 of them free, and 2 GiB of free swap."""
    machine = SimpleNamespace(total=24 * GIB, available=20 * GIB)
    swap = SimpleNamespace(free=2 * GIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(memory.psutil, "swap_memory", lambda: swap)
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def test_a_machine_without_control_groups(root: Path) -> None:
    assert machine_memory(root=root) == (20 * GIB, 24 * GIB)
    assert machine_memory(swap=True, root=root) == (22 * GIB, 24 * GIB)


def test_the_tightest_of_nested_groups_counts_its_caches_as_free(root: Path) -> None:
    """Only the limit at the mount's root was read, and memory used by other groups did not count."""
    (root / "proc/self/cgroup").write_text("0::/user/job\n")
    group = root / "sys/fs/cgroup/user"
    write_group(group, VERSION_2, 8, 7, cache=2)
    write_group(group / "job", VERSION_2, "max", 1, cache=0)
    assert machine_memory(root=root) == (3 * GIB, 8 * GIB)


def test_a_container_sees_its_group_at_the_mounts_root(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("4:cpu:/a\n9:memory:/docker/1f\n0::/\n")
    write_group(root / "sys/fs/cgroup/memory", VERSION_1, 6, 6, cache=2)
    assert machine_memory(root=root) == (2 * GIB, 6 * GIB)


@pytest.mark.parametrize(
    ("needed", "end"),
    [
        (5, "got 3.0 GiB free of the 8.0 GiB of this GPU. End other programs or wait"),
        (9, "got 3.0 GiB free of the 8.0 GiB of this GPU. Wait"),
    ],
)
def test_the_sentence_has_both_figures_and_the_cure(needed: int, end: str) -> None:
    sizes = (3 * GIB, 8 * GIB)
    check_fits("a step", 3 * GIB, sizes, "GPU", "wait")
    with pytest.raises(UserError) as caught:
        check_fits("a step", needed * GIB, sizes, "GPU", "wait")
    first = f"memory must suffice for a step: {needed}.0 GiB are needed, "
    assert str(caught.value) == first + end


FAULTS = """
import resource
import torch
from conf.devices.memory import reuse_freed_memory

reuse_freed_memory()
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    activations = [torch.ones(2**20) for _ in range(64)]  # 256 MiB, 65,536 pages
    del activations
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's mallopt")
def test_freed_memory_is_used_again() -> None:
    """Bug: each training step on a CPU had a million page faults, for the same activations."""
    command = [sys.executable, "-c", FAULTS]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 1000
