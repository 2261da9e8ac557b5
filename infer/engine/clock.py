"""The clock of a decoding loop."""

import time
from collections.abc import Callable

import torch

FINE = 1e-5  # seconds of a clock's tick: a step of the smallest model takes 1e-3
Clock = Callable[[], float]


def loop_clock(device: torch.device) -> Clock:
    """Return the clock of steps on a device.

    One thread that does all the work has a clock of its own, on which no other process shows.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return fine_clock(time.thread_time, time.perf_counter) if alone else time.perf_counter


def fine_clock(first: Clock, second: Clock) -> Clock:
    """Return the first clock, or the second where the first does not tell a step from the next: a thread's may
    tick every 10 ms.
    """
    return first if tick_of(first) <= FINE else second


def tick_of(clock: Clock) -> float:
    """Return the seconds from one reading of a busy clock to the next other one, the least of three."""
    ticks = list[float]()
    while len(ticks) < 3:
        began = clock()
        while (now := clock()) == began:
            pass
        ticks.append(now - began)
    return min(ticks)
