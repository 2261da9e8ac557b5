"""The time of a decoding step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from transformers import PreTrainedModel

from infer.engine.forward import agreed_value


class Stopwatch:
    """Times the steps of one batch, from the first proposal to the first result.

    Observing results is part of the loop's time too: it counts to the next step. Where
    a model is divided over ranks, every rank reads rank 0's time (`target`: the divided
    model, if `lm` is whole): ranks that decided differently would wait for each other.
    """

    def __init__(
        self, lm: PreTrainedModel, *, target: PreTrainedModel | None = None
    ) -> None:
        self._agreed = partial(agreed_value, target or lm)
        self._running = False
        self._began = 0.0
        self._observing = 0.0
        self._seconds = 0.0

    def start(self) -> None:
        """Start a step, unless another sequence of the batch did."""
        if not self._running:
            self._running = True
            self._began = time.perf_counter()

    def reset(self) -> None:
        """Forget a step without a result."""
        self._running = False
        self._observing = 0.0

    @contextmanager
    def observing(self) -> Iterator[float]:
        """Yield the seconds of the step. The context's own time is the next step's."""
        began = time.perf_counter()
        if self._running:
            self._running = False
            self._seconds = self._agreed(began - self._began + self._observing)
            self._observing = 0.0
        yield self._seconds
        self._observing += time.perf_counter() - began

    @contextmanager
    def part(self) -> Iterator[list[float]]:
        """Yield a list that holds the seconds of the context after its end."""
        seconds: list[float] = []
        began = time.perf_counter()
        yield seconds
        seconds.append(self._agreed(time.perf_counter() - began))
