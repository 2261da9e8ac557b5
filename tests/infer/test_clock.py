"""What divides by a measured duration bears a clock that reads the same twice."""

import time
from collections.abc import Iterator

import pytest

from infer.drafters import stopwatch as clocks
from infer.drafters.stopwatch import fine_clock, tick_of
from infer.engine.runner import TICK, duration
from infer.loop import Step
from infer.view import Summary


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


def test_a_thread_clock_of_10_ms_measures_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every step took 0 or 10 ms by it: a ZeroDivisionError at the first text, or a table of noise."""
    assert tick_of(coarse) == pytest.approx(0.01)
    assert fine_clock(coarse, time.perf_counter) is time.perf_counter
    assert fine_clock(time.perf_counter, coarse) is time.perf_counter


def test_a_clock_that_stands_divides_nothing_by_zero(standing: None) -> None:
    """Rates, costs, bandwidths and tokens per second were divided by the difference of two readings."""
    assert duration(5.0, 5.0) == duration(5.0, 4.0) == TICK
    summary = Summary()
    for _ in range(2):
        summary.add(Step(0, [1, 2], 1, 1, False))
    assert "tokens/s" in str(summary)
