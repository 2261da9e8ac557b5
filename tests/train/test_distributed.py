import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from train.distributed import Pulse, StopSignals, shared_store

Start = Callable[..., list[Pulse]]


@pytest.fixture
def ends() -> list[str]:
    return []


@pytest.fixture
def start(ends: list[str]) -> Iterator[Start]:
    """Start pulses, one for each store; `ends` gets what they say. They are finished after the test."""
    pulses: list[Pulse] = []

    def start(*stores: dist.Store, patience: float = 0.4) -> list[Pulse]:
        for rank, store in enumerate(stores):
            options = {"interval": 0.02, "patience": patience, "end": ends.append}
            pulses.append(Pulse(store, rank=rank, ranks=len(stores), **options))
        return pulses

    yield start
    for pulse in pulses:
        pulse.finish()


def wait_for(ends: list[str], count: int) -> None:
    limit = time.monotonic() + 20
    while len(ends) < count and time.monotonic() < limit:
        time.sleep(0.02)


def test_ranks_that_live_or_have_finished_end_nobody(
    start: Start, ends: list[str]
) -> None:
    pulses = start(*[dist.HashStore()] * 3)
    pulses[2].finish()
    time.sleep(1.0)
    assert ends == []


def test_a_silent_rank_is_named_by_the_others(start: Start, ends: list[str]) -> None:
    """A rank that died left the others in a collective until the group's timeout, half an hour."""
    pulses = start(*[dist.HashStore()] * 3)
    pulses[1]._finished.set()  # as if killed: no last word
    wait_for(ends, 2)
    assert sorted(line.split(":")[0] for line in ends) == ["rank 0", "rank 2"]
    assert all("no sign of life from rank 1 for 0 s" in line for line in ends)


class Gone:
    """A store that ends with its owner."""

    def __init__(self) -> None:
        self.store, self.gone = dist.HashStore(), False
        self.get = self.store.get

    def set(self, *arguments: str) -> None:
        if self.gone:
            raise dist.DistNetworkError("closed")
        self.store.set(*arguments)


def test_the_end_of_the_store_is_the_end_of_rank_0(
    start: Start, ends: list[str]
) -> None:
    store = Gone()
    first, _ = start(store, store)
    first.finish()
    time.sleep(0.1)
    store.gone = True
    wait_for(ends, 1)
    assert "no sign of life from rank 0" in ends[0]


def test_a_machine_that_was_suspended_ends_nobody(
    start: Start, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that were suspended, and woke a moment apart, took each other for dead."""
    clock, away = time.monotonic, [0.0]
    monkeypatch.setattr("train.distributed.time.monotonic", lambda: clock() + away[0])
    start(*[dist.HashStore()] * 3)
    time.sleep(0.2)
    away[0] = 100.0
    time.sleep(0.3)
    assert ends == []


def test_the_watch_opens_no_port_of_its_own(
    start: Start, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listened on a second, random port of rank 0, which a firewall between machines leaves closed."""
    met = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(met.port))

    def listening() -> set[int]:
        connections = psutil.Process(os.getpid()).net_connections("tcp")
        return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}

    before = listening()
    start(shared_store(), shared_store(), patience=5)
    time.sleep(0.2)
    assert listening() == before and ends == []
    assert int(met.get("pulse/0")) > 0 and int(met.get("pulse/1")) > 0


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_closed_terminal_stops_a_run_unless_it_was_to_outlive_it(
    handler: signal.Handlers,
) -> None:
    """SIGHUP killed the ranks unsaved, under nohup too."""
    numbers = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        signal.signal(signal.SIGHUP, handler)
        stop = StopSignals()
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop._stop == (handler is signal.SIG_DFL)
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
