import os
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from train.distributed import Pulse, shared_store


def pulses(store: dist.Store, ends: list[str], ranks: int) -> list[Pulse]:
    timing = {"interval": 0.02, "patience": 0.4}
    return [Pulse(store, rank=r, ranks=ranks, end=ends.append, **timing) for r in range(ranks)]


def wait_for(ends: list[str], count: int) -> None:
    limit = time.monotonic() + 20
    while len(ends) < count and time.monotonic() < limit:
        time.sleep(0.02)


def test_ranks_that_live_or_have_finished_end_nobody() -> None:
    ends: list[str] = []
    first, second, third = pulses(dist.HashStore(), ends, 3)
    third.finish()
    time.sleep(1.0)
    assert ends == []
    first.finish()
    second.finish()


def test_a_silent_rank_is_named_by_the_others() -> None:
    """A rank that died left the others in a collective until the group's timeout, half an hour."""
    ends: list[str] = []
    first, second, third = pulses(dist.HashStore(), ends, 3)
    second._finished.set()  # as if killed: no last word
    wait_for(ends, 2)
    assert sorted(line.split(":")[0] for line in ends) == ["rank 0", "rank 2"]
    assert all("no sign of life from rank 1 for 0 s" in line for line in ends)
    first.finish()
    third.finish()


def test_the_end_of_the_store_is_the_end_of_rank_0() -> None:
    class Gone:
        def __init__(self) -> None:
            self.store, self.gone = dist.HashStore(), False

        def set(self, *arguments: object) -> None:
            if self.gone:
                raise dist.DistNetworkError("closed")
            self.store.set(*arguments)

        def get(self, name: str) -> bytes:
            return self.store.get(name)

    store, ends = Gone(), []
    first, second = pulses(store, ends, 2)  # type: ignore[arg-type]
    first.finish()
    time.sleep(0.1)
    store.gone = True
    wait_for(ends, 1)
    assert "no sign of life from rank 0" in ends[0]
    second.finish()


def test_a_machine_that_was_suspended_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that were suspended, and woke a moment apart, took each other for dead."""
    clock, away = time.monotonic, [0.0]
    monkeypatch.setattr("train.distributed.time.monotonic", lambda: clock() + away[0])
    ends: list[str] = []
    found = pulses(dist.HashStore(), ends, 3)
    time.sleep(0.2)
    away[0] = 100.0
    time.sleep(0.3)
    assert ends == []
    for pulse in found:
        pulse.finish()


def test_the_watch_opens_no_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listened on a second, random port of rank 0, which a firewall between machines leaves closed."""
    met = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(met.port))

    def listening() -> set[int]:
        connections = psutil.Process(os.getpid()).net_connections("tcp")
        return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}

    before = listening()
    ends: list[str] = []
    stores = [shared_store() for _ in range(2)]
    found = [
        Pulse(store, rank=rank, ranks=2, interval=0.02, patience=5, end=ends.append)
        for rank, store in enumerate(stores)
    ]
    time.sleep(0.2)
    assert listening() == before and ends == []
    assert int(met.get("pulse/0")) > 0 and int(met.get("pulse/1")) > 0
    for pulse in found:
        pulse.finish()
