"""Clocks that tick seldom."""

import time

import pytest

from infer.drafters.stopwatch import fine_clock, tick_of
from infer.engine.runner import TICK, duration


def test_a_clock_of_10_ms_times_no_step() -> None:
    """gVisor's clock of a thread reads 0 or 10 ms: a ZeroDivisionError, or noise."""

    def coarse() -> float:
        return int(100 * time.thread_time()) / 100

    assert tick_of(coarse) == pytest.approx(0.01)
    assert fine_clock(coarse, time.perf_counter) is time.perf_counter
    assert fine_clock(time.perf_counter, coarse) is time.perf_counter
    assert duration(5.0, 5.0) == duration(5.0, 4.0) == TICK
