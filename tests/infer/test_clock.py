"""What divides by a measured duration bears a clock that reads the same twice."""

import time
from collections.abc import Iterator

import pytest
import torch

from infer.drafters.auto import AutoPolicy
from infer.engine import runner as clocks
from infer.engine.runner import TICK, duration, fine_clock, tick_of
from infer.engine.sampling import GREEDY
from infer.loop import Step
from infer.speed import profile as row_times
from infer.speed.limit import bandwidth
from infer.speed.profile import measure_costs
from infer.view import Summary
from tests.conftest import tiny_llama


def coarse() -> float:
    """gVisor's clock of a thread."""
    return int(100 * REAL()) / 100


REAL = time.thread_time


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every clock ticks so seldom that whole measurements lie between two ticks."""
    monkeypatch.setattr(time, "thread_time", lambda: 5.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    monkeypatch.setattr(clocks, "tick_of", lambda clock: TICK)
    yield


def test_a_thread_clock_of_10_ms_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step took 0 or 10 ms by it: a ZeroDivisionError at the first text, or a table of noise."""
    assert tick_of(coarse) == pytest.approx(0.01)
    assert fine_clock(coarse, time.perf_counter) is time.perf_counter
    assert fine_clock(time.perf_counter, coarse) is time.perf_counter
    monkeypatch.setattr(time, "thread_time", coarse)
    monkeypatch.setattr(row_times, "SECONDS", 0.05)
    result = measure_costs(tiny_llama(), batch=1, context=128, sampling=GREEDY)
    assert 0 < result(1) <= result(4)
    assert AutoPolicy(result, 5).most >= 1


def test_a_clock_that_stands_divides_nothing_by_zero(standing: None) -> None:
    """Rates, costs, bandwidths and tokens per second were divided by the difference of two readings."""
    lm = tiny_llama()
    assert duration(5.0, 5.0) == duration(5.0, 4.0) == TICK
    result = measure_costs(lm, batch=1, context=128, sampling=GREEDY)
    AutoPolicy(result, 5)
    summary = Summary()
    for _ in range(2):
        summary.add(Step(0, [1, 2], 1, 1, False))
    assert "tokens/s" in str(summary)


def test_a_bandwidth_is_measured_over_some_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many calls make a burst was said by a single one, which took no time."""
    real = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: int(100 * real()) / 100)
    monkeypatch.setattr("infer.speed.limit.SECONDS", 0.05)
    assert all(rate > 0 for rate in bandwidth(torch.device("cpu"), size=2**20).values())
