"""Compute the time of a text on a shared machine from the times of its steps.

A run is a list of steps, each with a shape and a time. Other processes slow down some steps, so
the time of a text is not the sum of its own steps. Let s_i be the shape of step i, and q_s the
lower decile of the times of all steps with shape s, over all texts and rounds of the decoder:

    time = first + q_{s_1} + ... + q_{s_n}.

Other work on the machine changes q_s little as long as a tenth of the steps is undisturbed. (A
median jumps if about half of the steps are disturbed.) The first step includes the prompt's
forward. Its time depends on the prompt and is measured only a few times. So `first` is the
prompt's fastest first step by any decoder, times the lower decile over all prompts of the
decoder's ratios to it. A text without step times has the time of its fastest run.
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
MIN_PROMPTS = 5  # the minimum number of prompts for an interval
QUANTILE = 0.1
#: The minimum number of steps for a quantile; shapes with fewer steps are joined to a neighbour.
MIN_STEPS = 8
Array = npt.NDArray[Any]


class Shape(NamedTuple):
    """The properties of a step that determine its cost.

    `levels` is the number of a draft model's forwards, 0 without a draft model. `probes` and
    `rows` are numbers of rows in the model's forward; `rows` includes the probes.
    """

    levels: int
    probes: int
    rows: int


#: A step's shape and seconds. The first step of a run includes the prompt's forward.
TimedStep = tuple[Shape, float]
WHOLE = Shape(0, 0, 0)  # the shape of a text without step times


@dataclass(frozen=True)
class StepTimes:
    """The steps of a run in their order, a list for each property.

    `switches` are the involuntary context switches of the process with all of its threads.
    """

    levels: list[int]
    probes: list[int]
    rows: list[int]
    microseconds: list[int]
    cpu_microseconds: list[int]
    switches: list[int]

    @classmethod
    def parse(cls, record: dict[str, str]) -> "StepTimes":
        """Return the steps of a stored record, with their shapes and times."""
        return cls(
            **{
                each.name: list(map(int, record[each.name].split()))
                for each in fields(cls)
            }
        )

    def record(self) -> dict[str, str]:
        """Return the lists as strings of numbers, which are short in indented JSON."""
        return {
            name: " ".join(map(str, column)) for name, column in asdict(self).items()
        }

    def timed(self) -> list[TimedStep]:
        """Return the steps' shapes and seconds."""
        shapes = map(Shape, self.levels, self.probes, self.rows)
        return [(shape, 1e-6 * time) for shape, time in zip(shapes, self.microseconds)]

    @property
    def resolved(self) -> bool:
        """False if the resolution of the clock was too coarse to time every step."""
        return min(self.microseconds) > 0


class StepClock:
    """Records seconds, CPU seconds and involuntary switches at the end of each step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._stamps: list[tuple[float, float, int]] = []
        self.stamp()

    def stamp(self) -> None:
        """Record the end of a step."""
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        self._stamps.append((self._clock(), time.process_time(), switches))

    def stamp_end(self) -> None:
        """Add the time since the last step to the last step."""
        if len(self._stamps) > 1:
            self._stamps.pop()
        self.stamp()

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last stamp."""
        return self._stamps[-1][0] - self._stamps[0][0]

    @property
    def first_seconds(self) -> float:
        """Seconds of the first step, which reads the prompt."""
        return self._stamps[1][0] - self._stamps[0][0]

    def times(self, shapes: Sequence[Shape]) -> StepTimes:
        """Return the times of steps with these shapes, one step for each stamp."""
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

    `fastest_first[p]` is the time of the fastest first step of prompt p by any decoder; None:
    by this decoder. For bootstrap intervals, times are computed for draws of prompts:
    `weights[r, p]` says how often draw r contains prompt p. The quantiles are then computed over
    the drawn prompts.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[Sequence[TimedStep]]],
        fastest_first: Sequence[float] | None = None,
        quantile: float = QUANTILE,
    ) -> None:
        self._size = len(prompts)
        runs_of = np.array([len(runs) for runs in prompts])
        pooled: dict[Shape, list[tuple[float, int]]] = {}
        for p, runs in enumerate(prompts):
            for run in runs:
                for shape, seconds in run[1:]:
                    pooled.setdefault(shape, []).append((seconds, p))
        groups = merge_rare([pooled[shape] for shape in sorted(pooled)])
        # For each class of steps: its steps per run of each prompt, and the times of its steps.
        self._terms: list[tuple[Array, StepClass | None]] = []
        for group in groups:
            steps = StepClass(group, self._size, quantile)
            self._terms.append((steps.counts / runs_of, steps))
        if fastest_first is None:
            self._terms.append((np.array(first_steps(prompts)), None))
        else:
            ratios = [
                (run[0][1] / fastest_first[p], p)
                for p, runs in enumerate(prompts)
                for run in runs
            ]
            first = StepClass(ratios, self._size, quantile)
            self._terms.append((np.array(fastest_first), first))

    @classmethod
    def of_whole_texts(cls, prompts: Sequence[Sequence[float]]) -> "TextTimes":
        """Return the times of texts without step times: each prompt's fastest run."""
        return cls([[[(WHOLE, seconds)] for seconds in runs] for runs in prompts])

    @property
    def seconds(self) -> float:
        """The total time of all texts in seconds."""
        ones = np.ones(self._size)
        return float(self.total(ones[None], ones)[0])

    def total(self, weights: Array, scale: Array) -> Array:
        """Return the total seconds of each draw (R,), with the text of prompt p scaled by `scale[p]`."""
        total = np.zeros(len(weights))
        for amounts, steps in self._terms:
            seconds = 1.0 if steps is None else steps.quantiles(weights)
            total = total + weights @ (scale * amounts) * seconds
        return total


class StepClass:
    """The times of steps that should take equally long, each with the index of its prompt."""

    def __init__(
        self, steps: Sequence[tuple[float, int]], size: int, quantile: float
    ) -> None:
        ordered = sorted(steps)
        prompts = np.array([p for _, p in ordered])
        self._seconds = np.array([seconds for seconds, _ in ordered])
        # (n, P): the number of steps up to the n-th, by prompt
        self._cumulative = (prompts[:, None] == np.arange(size)).cumsum(axis=0)
        self._quantile = quantile
        self.counts = self._cumulative[-1]

    def quantiles(self, weights: Array) -> Array:
        """Return the quantile of the times of each draw (R,), by bisection."""
        target = self._quantile * (weights @ self.counts)
        low = np.zeros(len(weights), dtype=int)
        high = np.full(len(weights), len(self._seconds) - 1)
        while (low < high).any():
            middle = (low + high) // 2
            enough = (weights * self._cumulative[middle]).sum(axis=1) >= target
            low = np.where(enough, low, middle + 1)
            high = np.where(enough, middle, high)
        return self._seconds[low]


def first_steps(prompts: Sequence[Sequence[Sequence[TimedStep]]]) -> list[float]:
    """Return the time of each prompt's fastest first step in seconds."""
    return [min(run[0][1] for run in runs) for runs in prompts]


def merge_rare(groups: Sequence[list[Any]]) -> list[list[Any]]:
    """Join neighbouring groups until each has at least MIN_STEPS steps, if there are enough."""
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
    """Return the (R,) speedups of a decoder over plain decoding, one for each draw of prompts.

    `scale[p]` is the ratio of plain decoding's tokens to the decoder's, for texts of unequal
    length. Without `weights` there is one draw, with each prompt once.
    """
    scales = np.asarray(scale, dtype=np.float64)
    ones = np.ones_like(scales)
    weights = ones[None] if weights is None else weights
    result: Array = plain.total(weights, ones) / other.total(weights, scales)
    return result


def speedup_interval(
    plain: TextTimes, other: TextTimes, scale: Sequence[float]
) -> Interval | None:
    """Return the bootstrap interval over prompts; None for fewer than MIN_PROMPTS prompts."""
    if len(scale) < MIN_PROMPTS:
        return None
    rng = np.random.default_rng(0)
    even = np.full(len(scale), 1 / len(scale))
    draws = rng.multinomial(len(scale), even, size=RESAMPLES)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(speedup(plain, other, scale, draws), [tail, 1 - tail])
    return float(low), float(high)
