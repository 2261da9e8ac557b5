"""Durations that divide: a clock that ticks every 10 ms, as a sandbox's may, reads the same twice."""

TICK = 1e-6  # seconds


def duration(began: float, ended: float) -> float:
    """Return the seconds between two readings of a clock, `TICK` at least."""
    return max(ended - began, TICK)
