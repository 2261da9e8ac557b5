"""Test clocks with a coarse resolution."""

from infer.engine.runner import TICK, duration


def test_a_clock_of_10_ms_times_no_step() -> None:
    """Regression: in a sandbox a step took 0 s, which raised ZeroDivisionError."""
    assert duration(5.0, 5.0) == duration(5.0, 4.0) == TICK
