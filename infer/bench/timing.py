"""Time of a text on a shared machine, from the times of its steps.

A run is a list of steps, each with its shape and seconds. Other processes slow down some of
the steps, so the time of a text is not the sum of its own. With s_i the shape of step i and
m_s the median seconds of all steps of this shape, of every text and round of the decoder,

    time = first + m_{s_1} + ... + m_{s_n},

where `first` is the step with the prompt's forward, the shortest of the prompt's runs. Work
beside the run moves m_s little as long as it meets less than half of the steps. A text without
step times is its first step: its time is that of its fastest run.
"""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from infer.bench.statistics import LEVEL, Interval

RESAMPLES = 2000
MIN_PROMPTS = 5  # of an interval
MIN_STEPS = 8  # of a median; shapes with fewer steps share one with their neighbours
Array = npt.NDArray[Any]


class Shape(NamedTuple):
    """What decides the cost of a step.

    `levels` counts a draft model's forwards, 0 if none drafts. `probes` and `rows` are of the
    model's forward; the rows include the probes.
    """

    levels: int
    probes: int
    rows: int


#: A step's shape and seconds. The first step of a run includes the prompt's forward.
TimedStep = tuple[Shape, float]
WHOLE = Shape(0, 0, 0)  # of a text without step times


@dataclass(frozen=True)
class StepTimes:
    """The steps of a run by column, in their order.

    `switches` are the process's involuntary context switches, with all of its threads.
    """

    levels: list[int]
    probes: list[int]
    rows: list[int]
    microseconds: list[int]
    cpu_microseconds: list[int]
    switches: list[int]

    @classmethod
    def parse(cls, record: dict[str, str]) -> "StepTimes":
        """Return the steps of a record."""
        return cls(
            **{
                each.name: list(map(int, record[each.name].split()))
                for each in fields(cls)
            }
        )

    def record(self) -> dict[str, str]:
        """Return the columns as texts, which are short in indented JSON."""
        return {
            name: " ".join(map(str, column)) for name, column in asdict(self).items()
        }

    def timed(self) -> list[TimedStep]:
        """Return the steps' shapes and seconds."""
        shapes = map(Shape, self.levels, self.probes, self.rows)
        return [(shape, 1e-6 * time) for shape, time in zip(shapes, self.microseconds)]

    @property
    def resolved(self) -> bool:
        """False if a step took no time by a clock that ticks too slowly."""
        return min(self.microseconds) > 0


class StepClock:
    """Stamps the end of each step with seconds, CPU seconds and involuntary switches."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._stamps: list[tuple[float, float, int]] = []
        self.stamp()

    def stamp(self) -> None:
        """End a step."""
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        self._stamps.append((self._clock(), time.process_time(), switches))

    def stamp_end(self) -> None:
        """Count the time since the last step to it."""
        if len(self._stamps) > 1:
            self._stamps.pop()
        self.stamp()

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last stamp."""
        return self._stamps[-1][0] - self._stamps[0][0]

    @property
    def first_seconds(self) -> float:
        """Seconds of the first step."""
        return self._stamps[1][0] - self._stamps[0][0]

    def times(self, shapes: Sequence[Shape]) -> StepTimes:
        """Return the times of steps of these shapes, one for each stamp."""
        columns = np.diff(np.array(self._stamps, dtype=np.float64), axis=0)[
            : len(shapes)
        ]
        seconds, cpu, switches = columns.reshape(-1, 3).T
        return StepTimes(
            levels=[shape.levels for shape in shapes],
            probes=[shape.probes for shape in shapes],
            rows=[shape.rows for shape in shapes],
            microseconds=np.rint(1e6 * seconds).astype(int).tolist(),
            cpu_microseconds=np.rint(1e6 * cpu).astype(int).tolist(),
            switches=switches.astype(int).tolist(),
        )


class TextTimes:
    """The time of a decoder's texts; `prompts[p]` are the runs of prompt p.

    Times are of draws of prompts: `weights` (R, P) has how often each draw has each prompt.
    The medians are then those of the drawn prompts.
    """

    def __init__(
        self, prompts: Sequence[Sequence[Sequence[TimedStep]]], quantile: float = 0.5
    ) -> None:
        self._first = np.array([min(run[0][1] for run in runs) for runs in prompts])
        runs_of = np.array([len(runs) for runs in prompts])
        pooled: dict[Shape, list[tuple[float, int]]] = {}
        for p, runs in enumerate(prompts):
            for run in runs:
                for shape, seconds in run[1:]:
                    pooled.setdefault(shape, []).append((seconds, p))
        groups = merge_rare([pooled[shape] for shape in sorted(pooled)])
        self._classes = [StepClass(group, runs_of, quantile) for group in groups]

    @property
    def seconds(self) -> float:
        """The time of all texts."""
        ones = np.ones(len(self._first))
        return float(self.total(ones[None], ones)[0])

    def total(self, weights: Array, scale: Array) -> Array:
        """Return the (R,) seconds of each draw; a prompt's text counts `scale[p]` times."""
        total = weights @ (scale * self._first)
        for each in self._classes:
            total = total + weights @ (scale * each.per_text) * each.quantiles(weights)
        return total


class StepClass:
    """Steps of like shape: how many a text has, and how long one takes."""

    def __init__(
        self, steps: Sequence[tuple[float, int]], runs_of: Array, quantile: float
    ) -> None:
        ordered = sorted(steps)
        prompts = np.array([p for _, p in ordered])
        one_hot = prompts[:, None] == np.arange(len(runs_of))
        self._seconds = np.array([seconds for seconds, _ in ordered])
        self._counts = one_hot.cumsum(axis=0)  # (n, P): steps up to the n-th, by prompt
        self._quantile = quantile
        self.per_text = self._counts[-1] / runs_of

    def quantiles(self, weights: Array) -> Array:
        """Return the (R,) quantile of the steps of each draw, by bisection."""
        target = self._quantile * (weights @ self._counts[-1])
        low = np.zeros(len(weights), dtype=int)
        high = np.full(len(weights), len(self._seconds) - 1)
        while (low < high).any():
            middle = (low + high) // 2
            enough = (weights * self._counts[middle]).sum(axis=1) >= target
            low = np.where(enough, low, middle + 1)
            high = np.where(enough, middle, high)
        return self._seconds[low]


def merge_rare(groups: Sequence[list[Any]]) -> list[list[Any]]:
    """Join neighbours until each group has MIN_STEPS steps; fewer in all are one group."""
    merged: list[list[Any]] = []
    for group in groups:
        if merged and len(merged[-1]) < MIN_STEPS:
            merged[-1] = merged[-1] + group
        else:
            merged.append(group)
    if len(merged) > 1 and len(merged[-1]) < MIN_STEPS:
        rest = merged.pop()
        merged[-1] = merged[-1] + rest
    return merged


def speedup(
    plain: TextTimes,
    other: TextTimes,
    scale: Sequence[float],
    weights: Array | None = None,
) -> Array:
    """Return the (R,) times of plain decoding over those of a decoder, by draw of prompts.

    `scale[p]` is the tokens of plain decoding over the decoder's, for texts of unequal length.
    Without `weights` the only draw has each prompt once.
    """
    scales = np.asarray(scale, dtype=np.float64)
    ones = np.ones_like(scales)
    weights = ones[None] if weights is None else weights
    result: Array = plain.total(weights, ones) / other.total(weights, scales)
    return result


def speedup_interval(
    plain: TextTimes, other: TextTimes, scale: Sequence[float]
) -> Interval | None:
    """Return the bootstrap interval over prompts, None for fewer than MIN_PROMPTS."""
    if len(scale) < MIN_PROMPTS:
        return None
    rng = np.random.default_rng(0)
    even = np.full(len(scale), 1 / len(scale))
    draws = rng.multinomial(len(scale), even, size=RESAMPLES)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(speedup(plain, other, scale, draws), [tail, 1 - tail])
    return float(low), float(high)
