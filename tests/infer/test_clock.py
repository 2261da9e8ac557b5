"""Clocks that tick seldom."""

from infer.engine.runner import TICK, duration


def test_a_clock_of_10_ms_times_no_step() -> None:
    """In a sandbox a step took no time: a ZeroDivisionError."""
    assert duration(5.0, 5.0) == duration(5.0, 4.0) == TICK
