"""The time of a decoding step, by a clock that fits the device."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
from transformers import PreTrainedModel

from infer.engine.forward import agreed_value

Clock = Callable[[], float]
#: Longest tick of a usable clock in seconds; a step of the smallest model takes 1e-3.
MAX_TICK = 1e-5


class Stopwatch:
    """Times the steps of one batch, from the first proposal to the first result.

    Observing results is part of the loop's time too: it counts to the next step. Where
    a model is divided over ranks, every rank reads rank 0's time (`target`: the divided
    model, if `lm` is whole): ranks that decided differently would wait for each other.
    """

    def __init__(
        self, lm: PreTrainedModel, *, target: PreTrainedModel | None = None
    ) -> None:
        self._clock = loop_clock(lm.device)
        self._agreed = partial(agreed_value, target or lm)
        self._running = False
        self._began = 0.0
        self._observing = 0.0
        self._seconds = 0.0

    def start(self) -> None:
        """Start a step, unless another sequence of the batch did."""
        if not self._running:
            self._running = True
            self._began = self._clock()

    def reset(self) -> None:
        """Forget a step without a result."""
        self._running = False
        self._observing = 0.0

    @contextmanager
    def observing(self) -> Iterator[float]:
        """Yield the seconds of the step. The context's own time is the next step's."""
        began = self._clock()
        if self._running:
            self._running = False
            self._seconds = self._agreed(began - self._began + self._observing)
            self._observing = 0.0
        yield self._seconds
        self._observing += self._clock() - began

    @contextmanager
    def part(self) -> Iterator[list[float]]:
        """Yield a list that holds the seconds of the context after its end."""
        seconds: list[float] = []
        began = self._clock()
        yield seconds
        seconds.append(self._agreed(self._clock() - began))


def loop_clock(device: torch.device) -> Clock:
    """Return a thread's own clock if one CPU thread does all the work, else wall time."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    if alone:
        return fine_clock(time.thread_time, time.perf_counter)
    return time.perf_counter


def fine_clock(first: Clock, second: Clock) -> Clock:
    """Return the first clock, or the second if the first ticks too seldom.

    A thread's clock ticks every 10 ms in some sandboxes.
    """
    return first if tick_of(first) <= MAX_TICK else second


@cache  # waiting for three ticks of 10 ms once is enough
def tick_of(clock: Clock) -> float:
    """Return the shortest of three ticks of a clock in seconds."""
    ticks: list[float] = []
    while len(ticks) < 3:
        began = clock()
        while (now := clock()) == began:
            pass
        ticks.append(now - began)
    return min(ticks)
