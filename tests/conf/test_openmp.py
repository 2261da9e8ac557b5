"""Waiting threads of OpenMP sleep while other programs need the cores, and spin otherwise."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from conf.devices import openmp
from conf.devices.openmp import OWN_CHOICE, Watch, busy_seconds

ROOT = Path(__file__).parents[2]
STAT = """cpu  1000 0 1000 9000 0 0 0 0 0 0
cpu0 100 10 200 4000 50 3 7 900 60 0
cpu1 300 0 100 4000 0 0 0 0 0 0
cpu10 5000 0 0 0 0 0 0 0 0 0
intr 12345
"""
# Counts the process's threads: two of PyTorch, then while a watch holds threads, then after it released them.
COUNTED = """
import os, sys, time
from conf.devices.openmp import Watch, libgomp
import torch
torch.set_num_threads(2)
def threads(expected=None):
    until = time.monotonic() + 10
    while True:
        time.sleep(0.2)
        count = len(os.listdir("/proc/self/task"))
        if expected in (None, count) or time.monotonic() > until:
            return count
library = libgomp()
if library is None:
    sys.exit("PyTorch's OpenMP is not libgomp here")
values = torch.ones(1 << 20)
watch = Watch(library, 2)
sums, counts = [values.sum().item()], [threads()]
for load, more in ((1.0, 2), (0.0, 0)):
    watch.decide(load, 2)
    sums.append(values.sum().item())
    counts.append(threads(counts[0] + more))
print(sums, [count - counts[0] for count in counts])
"""


def test_the_seconds_of_its_own_cores_count() -> None:
    """Waiting for a disk and time stolen by a hypervisor do not count as busy."""
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert busy_seconds({0}, STAT) == pytest.approx(320 * tick)
    assert busy_seconds({0, 1}, STAT) == pytest.approx(720 * tick)


@pytest.mark.parametrize(
    ("loads", "holds"),
    [
        ([0.0], False),
        ([1.0], True),
        ([0.2], False),  # background work of the system
        ([1.0, 0.2], True),  # between the two limits nothing changes
        ([1.0, 0.0], False),
        ([1.0, 0.0, 2.0], True),
    ],
)
def test_threads_are_held_while_others_need_the_cores(
    loads: list[float], holds: bool
) -> None:
    watch = Watch(mock.Mock(), threads=2)
    for load in loads:
        watch.decide(load, cores=2)
    assert watch.holds is holds
    watch.decide(0.0, cores=2)  # ends the thread that holds them


def test_free_cores_are_not_needed() -> None:
    watch = Watch(mock.Mock(), threads=2)
    watch.decide(other_load=5.0, cores=8)
    assert not watch.holds


def test_as_many_threads_are_held_as_outnumber_the_cores() -> None:
    """libgomp spins only briefly while it manages more threads than there are cores."""
    library = mock.Mock()
    watch = Watch(library, threads=3)
    watch.decide(other_load=8.0, cores=8)
    watch.decide(other_load=0.0, cores=8)
    until = time.monotonic() + 5
    while not library.GOMP_parallel.called and time.monotonic() < until:
        time.sleep(0.01)
    (_, _, count, _), _ = library.GOMP_parallel.call_args
    assert 3 + count - 1 > 8


@pytest.mark.parametrize("own", [*OWN_CHOICE, None])
def test_the_users_own_choice_stays(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OWN_CHOICE:
        monkeypatch.delenv(name, raising=False)
    if own:
        monkeypatch.setenv(own, "active")
    started = mock.Mock()
    monkeypatch.setattr(openmp, "_started", False)
    monkeypatch.setattr(openmp, "libgomp", mock.Mock())
    monkeypatch.setattr(threading, "Thread", started)
    openmp.watch(1)
    assert not started.called, "one thread never waits"
    openmp.watch(2)
    openmp.watch(2)
    assert started.call_count == (own is None)


def test_libgomp_has_more_threads_while_they_are_held() -> None:
    """Two threads spun while another process was busy, and decoding fell to a tenth of its speed."""
    run = subprocess.run(
        [sys.executable, "-c", COUNTED], cwd=ROOT, capture_output=True, text=True
    )
    if "not libgomp" in run.stderr:
        pytest.skip(run.stderr.strip())
    assert run.returncode == 0, run.stderr
    # One thread that holds and one that is held.
    sums = [float(1 << 20)] * 3
    assert run.stdout.strip() == f"{sums} [0, 2, 0]"
