"""Estimate the costs and gains of decoding on this device from the steps so far.

The unit of time is a plain step, a step of one row.

    StepCosts       L(q), the time of a step of q rows, and the overhead of probes
    DraftForwards   c, the time of a draft model's forward, and how often its drafts continue
    Calibration     how often a candidate with a given weight is right
    Throughput      λ, tokens per plain step, and the allowance that bounds losses
    ProbeGain       h(k), the tokens that the answers of k adaptive tokens add to a draft

planner.py decides with these estimates.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from infer.loop import Verified

Array = NDArray[np.float64]
#: Numbers of rows at which L is estimated, with linear interpolation between them.
ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128)


@dataclass(frozen=True)
class Constants:
    """Constants of the planner. tests/benchmarks/planners.py compares other values."""

    #: Rows of the largest tree, and its depth in drafts.
    max_rows: int = 64
    max_depth: int = 16
    #: Candidates for a place.
    width: int = 2
    #: Number of recent steps over which rates are averaged.
    window: float = 100.0
    #: Bins of the calibration, the weight of its prior in trials, and the number of trials
    #: at which counts are halved.
    bins: int = 12
    prior_trials: float = 3.0
    max_trials: float = 400.0
    #: Number of recent steps of a shape; its time is their median.
    recent: int = 15
    #: Weight of the prior of L at each point, in steps, and the weight of a step with probes.
    prior_steps: float = 3.0
    probed_weight: float = 0.3
    #: Overhead of probes before any measurement, in plain steps, and its weight in steps.
    first_probing: float = 0.1
    prior_probing: float = 4.0
    #: A step counts as at most this many times its expected time, and as at least the inverse:
    #: other processes add time.
    outlier_cap: float = 4.0
    #: Smallest weight of a draft model's forward in its averages.
    min_pace: float = 1 / 32
    #: Steps between two updates of the row prices derived from L.
    update_every: int = 16
    #: Steps between two runs of plain steps, and the length of a run. The first step of a
    #: run has cold caches and is not counted.
    plain_every: int = 256
    plain_run: int = 4
    #: The allowance, in plain steps that drafting may lose: its first and its largest
    #: value. Drafting stops at 0 and restarts above `retry_allowance`. Meanwhile each step
    #: adds `saved_share`, and each dry run (a draft that is not verified, one every
    #: `dry_run_every` steps) adds its estimated gain, which may be negative.
    first_allowance: float = 10.0
    max_allowance: float = 24.0
    retry_allowance: float = 2.0
    saved_share: float = 0.01
    dry_run_every: int = 8
    #: This many steps after a comparison, a step is drafted again with fewer answers than it
    #: has and without answers, to measure their gain.
    compare_every: int = 4
    #: A trial is a step with twice as many probes as seem best, or more if their rows cost less
    #: than `trial_price` tokens. Steps without one before a trial, the comparisons of as many
    #: answers to collect before trials become rare, and the tokens that trials may cost: at the
    #: start, and per emitted token.
    trial_every: int = 48
    first_answers: int = 4
    trial_tokens: float = 3.0
    trial_share: float = 0.02
    trial_price: float = 0.3
    #: Prior of the probability that a text continues through a child of a draft model's
    #: node, and its weight in trials. It is high, because a planner that drafts a single
    #: level never learns the value of deeper ones.
    first_followed: float = 0.8
    prior_followed: int = 5


CONSTANTS = Constants()
# Points of L(q) in plain steps, by type of device. Measurements of models of 0.1M to 500M
# parameters on CPUs scatter around the first: L(8) is 1.03 in bfloat16 (AMX), 1.4 in int8 and up
# to 3.5 in float32. A GPU reads the weights for 64 rows as fast as for one.
_CPU = ((1, 2, 5, 8, 16, 32, 64, 128), (1.0, 1.05, 1.15, 1.4, 2.0, 3.2, 5.6, 10.4))
_GPU = ((1, 2, 64, 128), (1.0, 1.02, 1.2, 1.4))


def prior_costs(device: str) -> tuple[float, ...]:
    """Return L at `ROWS` in plain steps for a type of device, before any measurement."""
    rows, steps = _CPU if device == "cpu" else _GPU
    return tuple(np.interp(ROWS, rows, steps).tolist())


@dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of a step, including the `drafting` seconds of a draft model's `forwards`.

    `first` is True for the first sequence of a batch: its step is timed once.
    """

    seconds: float
    forwards: int = 0
    drafting: float = 0.0
    first: bool = True


class StepCosts:
    """L(q), the time of a step of q rows in plain steps: a prior, corrected by every step.

    Times are medians, because single steps are much longer beside other processes. The first
    step of a shape may have cold caches, so it does not count if it takes longer than expected.
    `probing` is the overhead of probes in addition to their rows: the adapter, and reading
    their answers. It is the difference of steps with and without probes of the same number of
    rows; where only steps with probes were timed, their time above `probing` is that of the
    rows. The part of the prior above one plain step is scaled to fit the measurements, most of
    all the ones of similar numbers of rows, so that the estimate also moves at numbers that no
    step has had. L is the increasing function next to the measurements and the scaled prior.
    `curve[q]` is L(q); `prices[q]` is the lowest price of one more row after the first q.
    """

    def __init__(
        self, prior: Sequence[float], constants: Constants = CONSTANTS
    ) -> None:
        self._constants = constants
        self._prior = np.array(prior) / prior[0] - 1  # above a plain step
        # By rows, and whether some are probes: recent times in plain steps, and their median.
        self._times: dict[tuple[int, bool], deque[float]] = {}
        self._medians: dict[tuple[int, bool], float] = {}
        self._steps = 0
        self._plain: deque[float] = deque(maxlen=constants.recent)  # seconds
        self._since_plain = constants.plain_every - 1
        self._plain_run = 0
        self._update()

    @property
    def plain_due(self) -> bool:
        """Whether the next step must be plain; the same for the whole batch."""
        return self._since_plain >= self._constants.plain_every

    def __call__(self, q: int) -> float:
        """Return L(q)."""
        if q < len(self.curve):
            return self.curve[q]
        return float(np.interp(q, self._rows, self._values))

    def times(self, first: int, count: int) -> list[float]:
        """Return L(q) for `count` numbers of rows from `first` on."""
        end = first + count
        if end <= len(self.curve):
            return self.curve[first:end]
        return [self(q) for q in range(first, end)]

    def in_plain_steps(self, seconds: float) -> float | None:
        """Convert seconds to plain steps; return None until a plain step was timed."""
        return seconds / median(self._plain) if self._plain else None

    def of(self, result: Verified) -> float:
        """Return the expected time of a step, in units of a plain step's time."""
        return self(result.rows) + result.probed * self.probing

    def observe(self, result: Verified, seconds: float) -> None:
        """Update the estimates by a measured step."""
        constants = self._constants
        seconds = max(seconds, 1e-5)  # some clocks are coarse
        if result.rows == 1:
            self._observe_plain(seconds)
            return
        self._since_plain += 1
        self._plain_run = 0
        steps = self.in_plain_steps(seconds)
        if steps is None:
            return
        expected = self.of(result)
        shape = result.rows, result.probed
        first = shape not in self._times
        times = self._times.setdefault(shape, deque(maxlen=constants.recent))
        if first and steps > expected:
            return
        cap = constants.outlier_cap
        times.append(expected * min(max(steps / expected, 1 / cap), cap))
        self._medians[shape] = median(times)
        self._steps += 1
        every = constants.update_every
        if self._steps < every or self._steps % every == 0:
            self._update()

    def _observe_plain(self, seconds: float) -> None:
        self._plain_run += 1
        if self._plain_run >= self._constants.plain_run:
            self._since_plain = 0
        if self._plain_run > 1:
            self._plain.append(seconds)

    def _update(self) -> None:
        constants = self._constants
        self.probing = self._overhead()
        points = [
            (
                q,
                time - 1 - probed * self.probing,
                len(self._times[q, probed])
                * (constants.probed_weight if probed else 1.0),
            )
            for (q, probed), time in self._medians.items()
        ]
        rows, above, weights = np.array(points).reshape(-1, 3).T
        self._rows, self._values = increasing(
            np.concatenate([ROWS, rows]),
            np.concatenate([self._scales(rows, above, weights) * self._prior, above]),
            np.concatenate([np.full(len(ROWS), constants.prior_steps), weights]),
        )
        self._values += 1
        every = np.arange(constants.max_rows + 1)
        curve = np.interp(every, self._rows, self._values)
        # The smallest slope from here to any larger number of rows. If the second row
        # costs a whole step and the next six are free, the rows pay only together.
        ahead = self._rows - every[:-1, None]
        slopes = (self._values - curve[:-1, None]) / np.where(ahead > 0, ahead, np.nan)
        self.prices: list[float] = np.nanmin(slopes, 1).tolist()
        self.curve: list[float] = [0.0, *curve.tolist()[1:]]

    def _scales(self, rows: Array, above: Array, weights: Array) -> Array:
        """Return the factors of the prior at ROWS that fit the measurements.

        A factor is a mean of the factor that fits all measurements (mostly steps of many rows)
        and of the factors at single numbers of rows, near ones with more weight.
        """
        steps = self._constants.prior_steps
        prior = np.interp(rows, ROWS, self._prior)
        least = 0.1 * float(self._prior @ self._prior) / len(ROWS)
        norm = float(weights @ prior**2) + least
        scale = (float(weights @ (prior * above)) + least) / norm if norm else 1.0
        single = np.divide(above, prior, out=np.zeros_like(prior), where=prior > 0)
        at = np.array(ROWS)[:, None]
        near = weights * (np.minimum(at, rows) / np.maximum(at, rows)) ** 2
        scales: Array = (near @ single + steps * scale) / (near.sum(1) + steps)
        return scales

    def _overhead(self) -> float:
        constants = self._constants
        known = constants.prior_probing
        total = known * constants.first_probing
        for (q, probed), time in self._medians.items():
            without = self._medians.get((q, False))
            if probed and without is not None:
                both = min(len(self._times[q, True]), len(self._times[q, False]))
                known += both
                total += both * (time - without)
        return max(0.0, total / known)


def increasing(x: Array, y: Array, weights: Array) -> tuple[Array, Array]:
    """Return the distinct x, ascending, and the increasing function there that fits y best.

    Its weighted squared error is the smallest of all functions from 0 at the first x that never
    decrease (isotonic regression): the largest, over points before, of the smallest mean from
    there to any point after.
    """
    distinct, index = np.unique(x, return_inverse=True)
    mass = np.bincount(index, weights)
    sums = np.bincount(index, weights * y)
    total, of_y = (np.concatenate([[0.0], part.cumsum()]) for part in (mass, sums))
    first, last = np.ogrid[: len(distinct), : len(distinct)]
    with np.errstate(divide="ignore", invalid="ignore"):
        means = (of_y[1:] - of_y[:-1, None]) / (total[1:] - total[:-1, None])
    means[first > last] = np.inf
    smallest = np.minimum.accumulate(means[:, ::-1], 1)[:, ::-1]
    smallest[first > last] = -np.inf
    fit = np.maximum(smallest.max(0), 0.0)
    fit[0] = 0.0
    return distinct, fit


class DraftForwards:
    """The time of a draft model's forward in plain steps; `time` starts as an estimate.

    `followed` is the probability that a text continues through a child of a node.
    """

    def __init__(self, time: float, constants: Constants = CONSTANTS) -> None:
        self.time = time
        self.followed = constants.first_followed
        self._min_pace = constants.min_pace
        self._cap = constants.outlier_cap
        self._timed = 0
        self._seen = constants.prior_followed

    def observe(self, forwards: int, steps: float | None) -> float:
        """Learn from forwards and return their total time in plain steps.

        `steps` is their measured total, or None until a plain step was timed.
        """
        if not forwards or steps is None:
            return forwards * self.time
        each = min(steps / forwards, self._cap * self.time)
        self._timed += 1
        pace = max(self._min_pace, 1 / (1 + self._timed))
        self.time += pace * (each - self.time)
        return forwards * each

    def record(self, followed: bool) -> None:
        """Record whether a text continued through a child of a node."""
        self._seen += 1
        pace = max(self._min_pace, 1 / self._seen)
        self.followed += pace * (followed - self.followed)


class Calibration:
    """Estimates the probability that a draft is right, given its weight and that all drafts before it are.

    Weights are binned. Bins with few trials use the overall ratio of right to expected drafts.
    """

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._max_trials = constants.max_trials
        self._prior_trials = constants.prior_trials
        self._trials = [0.0] * constants.bins
        self._right = [0.0] * constants.bins
        # Over all bins: the right candidates, and the number expected from their weights.
        self._all_right = self._expected = constants.prior_trials

    def chance(self, weight: float) -> float:
        """Return the probability that a candidate of this weight is right."""
        bin_, middle = self._bin(weight)
        prior = min(1.0, middle * self._all_right / self._expected)
        known = self._right[bin_] + self._prior_trials * prior
        return known / (self._trials[bin_] + self._prior_trials)

    def record(self, weight: float, right: bool) -> None:
        """Record whether a candidate was right."""
        bin_, middle = self._bin(weight)
        if self._trials[bin_] >= self._max_trials:
            self._trials[bin_] /= 2
            self._right[bin_] /= 2
        if self._expected >= self._max_trials:
            self._expected /= 2
            self._all_right /= 2
        self._trials[bin_] += 1
        self._right[bin_] += right
        self._expected += middle
        self._all_right += right

    def _bin(self, weight: float) -> tuple[int, float]:
        """Return the bin of a weight and the middle of the bin."""
        bins = len(self._trials)
        bin_ = min(bins - 1, int(weight * bins))
        return bin_, (bin_ + 0.5) / bins


class Throughput:
    """Tokens per plain step, and the allowance that bounds what drafting may lose.

    Gains over plain decoding are added to the allowance, losses subtracted. When it is used
    up, decoding is plain until the allowance has grown again: by a small share of each plain
    step, and by the gains that unverified drafts would have had.
    """

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self._allowance = constants.first_allowance
        self._tokens = 0.0
        self._steps = 0.0
        self.drafting = True

    @property
    def rate(self) -> float:
        """Return the tokens per plain step over the recent steps, at least 1."""
        return max(1.0, self._tokens / self._steps) if self._steps else 1.0

    def record(self, tokens: int, spent: float) -> None:
        """Record a step: its tokens, and its time in plain steps as the estimates have it.

        The measured time of a single step would end drafting: the first step of each shape
        takes several times as long.
        """
        constants = self._constants
        gain = tokens - spent
        if not self.drafting:
            self._allowance += min(gain, 0.0) + constants.saved_share
            self.drafting = self._allowance > constants.retry_allowance
            return
        fade = 1 - 1 / constants.window
        self._tokens = fade * self._tokens + tokens
        self._steps = fade * self._steps + spent
        allowance = min(self._allowance + gain, constants.max_allowance)
        # Bounded below, so that one bad step does not stop drafting for long.
        self._allowance = max(allowance, -constants.retry_allowance)
        self.drafting = self._allowance > 0

    def record_dry_run(self, gain: float) -> None:
        """Record the gain that an unverified draft would have had, in plain steps."""
        # A cumulative sum (Page 1954): the losses before a change do not count.
        self._allowance = max(0.0, self._allowance + gain)


class ProbeGain:
    """h(k): the tokens that the answers of k adaptive tokens add to the next draft.

    `answers[k - 1]` is the number of comparisons with at least k answers.
    """

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._window = constants.window
        # The mean tokens added by the first answer, the second, ...
        self._added = np.zeros(constants.max_depth)
        self.answers = np.zeros(constants.max_depth)
        self.gains = [0.0] * constants.max_depth  # h(1), h(2), ...

    def record(self, profits: Sequence[float]) -> None:
        """Record the expected tokens of a draft with 0, 1, 2, ... answers, less its rows' price.

        Steps with few answers say nothing about more.
        """
        known = len(profits) - 1
        counts, added = self.answers[:known], self._added[:known]
        counts += 1
        pace = np.maximum(1 / self._window, 1 / counts)
        added += pace * (np.diff(profits) - added)
        self.gains = self._added.cumsum().tolist()
