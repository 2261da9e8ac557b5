"""L(q): what a step of q rows costs on this device, followed by the loop's own clock. Pure.

A table begins as a prior, or as what earlier texts taught (cost_tables.py), and every step of a text corrects
it: no forward is run only to be measured. Points that no step came near yet move along with those beside a
step, so that a wrong prior is first corrected as a whole and then point by point.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from infer.engine.runner import FINE
from infer.engine.sampling import Sampling

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
EVERY = 256  # steps between two bursts of plain ones, of which the first is cold
BURST = 4  # plain steps of such a burst
# share of one step in the time of plain steps, and at least in a point
FOLLOWED = 1 / 4
LEARNED = 1 / 32
COLD = (
    4.0  # times the expected time that a step counts as at most: new shapes take longer
)
BEGUN = 0.1  # steps that the table at the beginning counts as in the fit
SHRUNK = 2.0  # steps that the fit over all points counts as at each of them
WILD = 2.0  # times the expected time, or its inverse: surprises beyond are clipped
UPDATED = (
    16  # steps between two updates of the table; the first so many steps update it each
)


@dataclass(frozen=True)
class Costs:
    """Time of a step by its rows, piecewise linear, in any unit; `weights`: steps that each point is worth."""

    rows: tuple[int, ...]
    ms: tuple[float, ...]
    weights: tuple[float, ...] = ()

    def __call__(self, q: int) -> float:
        """Return L(q); beyond the last point by the last slope."""
        right = min(max(1, bisect_right(self.rows, q)), len(self.rows) - 1)
        (q0, q1) = self.rows[right - 1 : right + 1]
        (t0, t1) = self.ms[right - 1 : right + 1]
        return t0 + (t1 - t0) * (q - q0) / (q1 - q0)


# In plain steps. Measured tables of 0.1M to 110M parameters on CPUs lie around the first: L(8) is 1.2 in
# bfloat16 and up to 3.5 in float32. A GPU's forward reads the weights for 64 rows as fast as for one.
_CPU = Costs((1, 2, 8, 16, 32, 64), (1.0, 1.2, 1.5, 2.0, 2.8, 4.0))
_GPU = Costs((1, 2, 64), (1.0, 1.02, 1.2))


def prior_costs(device: str, *, scale: float = 1.0) -> Costs:
    """Return L(q) in plain steps for a type of device of which nothing is known yet, times `scale`."""
    prior = _CPU if device == "cpu" else _GPU
    return Costs(
        ROWS, tuple(scale * prior(q) for q in ROWS), weights=(0.0,) * len(ROWS)
    )


def context_of(capacity: int) -> int:
    """Return the length class of texts of up to `capacity` tokens: about half of it, at most 2,048."""
    return min(4096, max(512, 2 ** (capacity - 1).bit_length())) // 2


def work(sampling: Sampling) -> tuple[bool, int, bool]:
    """Return what of the sampling decides how much is computed: not the temperature, nor where top_p cuts."""
    return sampling.temperature > 0, sampling.top_k, sampling.top_p < 1


class CostCurve:
    """A table that learns: `costs` is how it stands. With `base`, L(1) is fixed: it is the unit.

    Each point has a mean of the times seen there, and is shrunk towards the first table, scaled to fit all
    means: a slow first step makes no point dear for good. More rows never cost less (isotonic regression).
    """

    def __init__(self, costs: Costs, *, base: bool = False) -> None:
        self.costs = costs
        self._start = costs.ms
        self._base = costs.ms[0] if base else 0.0
        self._first = int(base)  # the first point that moves
        self._means = list(costs.ms)
        self._weights = list(costs.weights or [1 / LEARNED] * len(costs.rows))

    def learn(self, q: int, surprise: float) -> None:
        """Learn that a step of q rows took (1 + surprise) times what was expected."""
        for point, share in self._beside(q):
            if point >= self._first:
                seen = (1 + surprise) * self.costs.ms[point]
                pace = max(LEARNED, 1 / (1 + self._weights[point])) * share
                self._means[point] += pace * (seen - self._means[point])
                self._weights[point] += share
        self.costs = Costs(self.costs.rows, tuple(self._fitted()), tuple(self._weights))

    def _fitted(self) -> list[float]:
        base = self._base
        points = range(self._first, len(self._start))
        above = [ms - base for ms in self._start]
        fit = norm = BEGUN * sum(above[point] ** 2 for point in points) / len(points)
        for point in points:
            fit += self._weights[point] * above[point] * (self._means[point] - base)
            norm += self._weights[point] * above[point] ** 2
        scale = fit / norm if norm else 1.0  # a flat table has no scale
        values = list(self._start[: self._first])
        weights = [float("inf")] * self._first
        for point in points:
            weight = self._weights[point]
            expected = base + scale * above[point]
            values.append(
                (weight * self._means[point] + SHRUNK * expected) / (weight + SHRUNK)
            )
            weights.append(weight + SHRUNK)
        return rising(values, weights)

    def _beside(self, q: int) -> list[tuple[int, float]]:
        rows = self.costs.rows
        right = min(bisect_left(rows, q), len(rows) - 1)
        if rows[right] <= q or not right:
            return [(right, 1.0)]
        share = (q - rows[right - 1]) / (rows[right] - rows[right - 1])
        return [(right - 1, 1 - share), (right, share)]


class LoopCosts:
    """L(q) of a target by rows, up to `most`: `ms[q]` is L(q), `slopes[q]` the price of the next row.

    The unit is the table's; L(1) never moves, and the clock's time of plain steps is what it stands for.
    """

    def __init__(self, costs: Costs, most: int) -> None:
        self._curve = CostCurve(costs, base=True)
        self._most = most
        self._plain: float | None = (
            None  # milliseconds of a plain step, recent mean by the loop's clock
        )
        self.reading = 0.0  # of answers, beyond L(q)
        self.steps = 0
        self._since = EVERY - 1
        self._burst = 0
        self._update()

    @property
    def due(self) -> bool:
        """Whether the next step must be plain; the same for all sequences of a batch."""
        return self._since >= EVERY

    @property
    def costs(self) -> Costs:
        """The table as it stands."""
        return self._curve.costs

    def __call__(self, q: int) -> float:
        """Return L(q); a batch may have more rows than a tree."""
        return self.ms[q] if q <= self._most else self.costs(q)

    def observe(self, q: int, ms: float, *, answered: bool = False) -> float:
        """Learn from a step, `answered` with the reading of answers; return its time in plain steps."""
        ms = max(ms, 1e3 * FINE)  # by no clock is it free
        if q == 1:
            return self._follow(ms)
        self._since = self._since + 1
        self._burst = 0
        if self._plain is None:
            return self(q) / self.ms[1]
        spent = ms / self._plain
        expected = self(q) + (self.reading if answered else 0.0)
        surprise = clipped(spent * self.ms[1] / expected)
        if answered:
            self.reading = max(0.0, self.reading + LEARNED * surprise * expected)
        self._curve.learn(q, surprise)
        self.steps += 1
        if self.steps <= UPDATED or self.steps % UPDATED == 0:
            self._update()
        return min(spent, COLD * expected / self.ms[1])

    def in_units(self, ms: float) -> float | None:
        """Return milliseconds of the loop's clock in the table's unit; None before a plain step was seen."""
        return ms / self._plain * self.ms[1] if self._plain else None

    def _follow(self, ms: float) -> float:
        """Learn from a plain step; among its like, as in plain decoding, it meets warm caches."""
        self._burst += 1
        if self._burst >= BURST:
            self._since = 0
        if self._burst > 1:
            known = ms if self._plain is None else self._plain
            self._plain = known + FOLLOWED * (min(ms, WILD * known) - known)
        return 1.0

    def _update(self) -> None:
        ms = [0.0]
        costs = self.costs
        for q in range(1, self._most + 1):
            ms.append(max(ms[-1], costs(q)))  # more rows never cost less
        self.ms = ms
        self.slopes = slopes(ms)


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the nearest values that never fall, by pooling adjacent violators."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, u, m), (b, v, n) = pools[-2:]
            mean = a if u == float("inf") else (u * a + v * b) / (u + v)
            pools[-2:] = [(mean, u + v, m + n)]
    return [value for value, _, count in pools for _ in range(count)]


def clipped(ratio: float) -> float:
    """Return a measured time over the expected one, less 1, without what met something else."""
    return min(max(ratio, 1 / WILD), WILD) - 1


def slopes(ms: Sequence[float]) -> list[float]:
    """Return the price of the next row behind each number of rows: the least per row on the way to any more.

    Where the second row costs as much as a forward and the next six nothing, no row would be bought singly.
    """
    return [
        min((ms[more] - ms[q]) / (more - q) for more in range(q + 1, len(ms)))
        for q in range(len(ms) - 1)
    ]
