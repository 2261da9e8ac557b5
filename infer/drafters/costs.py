"""L(q): what a forward of q rows costs on this device, measured.

The cost is that of a loop's whole step, so that a row of drafts is weighed with all it brings: the forward,
the picks that are made with it, and the reading of the drafts, which of sampled text takes longer. Tables
are kept on disk by cost_tables.py; nothing here knows of disks or settings.
"""

import statistics
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.engine.agreement import agreed_value
from infer.engine.reading import Reading, Request
from infer.engine.runner import FINE, Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.engine.target import context_length
from infer.trees.tree import Tree

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
ENOUGH = 4.0  # times L(1): no number of accepted drafts pays for more rows than that
SECONDS = 3.0  # to measure in, more or less
BURST = 4  # steps of the same rows on end
TURNS = 9  # of two models
PROBES, WIDTH = 4, 4  # of which drafts are read, candidates of each
SLOW = 0.3  # seconds of a forward from which the wait is announced
EVERY = 256  # steps between two bursts of plain ones, of which the first is cold
FOLLOWED, LEARNED = 1 / 4, 1 / 32  # shares of one step in the time of plain steps, and in a point
COLD = 4.0  # times as long as expected that a step may be said to have taken: shapes that are new take longer
WILD = 2.0  # times as long as expected, or as short: what is beyond met something else
LAID_OUT = 16  # steps between two tables


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a step by rows in each sequence, between the measured ones by straight lines."""

    rows: tuple[int, ...]
    ms: tuple[float, ...]

    def __call__(self, q: int) -> float:
        """L(q); beyond the last measured one by the last slope."""
        right = min(max(1, bisect_right(self.rows, q)), len(self.rows) - 1)
        (q0, q1), (t0, t1) = self.rows[right - 1 : right + 1], self.ms[right - 1 : right + 1]
        return t0 + (t1 - t0) * (q - q0) / (q1 - q0)


def context_of(capacity: int) -> int:
    """The context measured at, for texts of up to `capacity` tokens: about half of it."""
    return min(4096, max(512, 2 ** (capacity - 1).bit_length())) // 2


def measured_at(capacity: int, *lms: PreTrainedModel) -> int:
    """The same, as far as these models have positions: learned ones end."""
    return min(context_of(capacity), *(context_length(lm.config) for lm in lms))


def work(sampling: Sampling) -> tuple[bool, int, bool]:
    """What of the sampling decides how much is computed: not how warm it is, nor where top_p cuts."""
    return sampling.temperature > 0, sampling.top_k, sampling.top_p < 1


class Bench:
    """Steps of a loop on a model, against the clock; with `drafts`, levels of a draft model."""

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        batch: int,
        context: int,
        sampling: Sampling = GREEDY,
        drafts: bool = False,
        static: bool | None = None,
    ) -> None:
        self._lm = lm
        self._runner = Runner(lm, capacity=context, max_rows=ROWS[-1], batch=batch, static=static)
        self._sampling, self._drafts = sampling, drafts
        # What it proposes is not fed: only the rows that are asked for are. But drawing it takes its time.
        self._drafter = AdaptiveDrafter([0], FixedPolicy(PROBES, nodes=PROBES, width=WIDTH))
        self._clock = self._runner.clock
        self._batch, self._token = batch, lm.config.vocab_size // 2
        self._requests = [Request([self._token])] * batch
        # All rows fit the same columns, so that fixed shapes of the cache are the same for one row and many;
        # theirs have as many drafts as the most rows, and probes beside these.
        self._runner.prefill([[self._token] * (context - ROWS[-1] - PROBES)] * batch)

    def burst(self, q: int) -> float:
        """Seconds of a step among its like, as steps of plain decoding are: the first finds the processor's
        caches as another number of rows has left them.
        """
        return statistics.median([self.step(q) for _ in range(BURST)][1:])

    def step(self, q: int) -> float:
        """Seconds of a forward of q rows in each sequence, and of all that comes with it."""
        seconds = self._level(q) if self._drafts else self._verification(q)
        return agreed_value(self._lm, max(seconds, FINE))  # by no clock is it free: costs divide

    def _level(self, q: int) -> float:
        """With what may follow a row."""
        tree, began = Tree.chain(self._token, probes=[self._token] * (q - 1)), self._clock()
        reading = self._forward(tree, fed=[0] * self._batch)
        for b in range(self._batch):
            reading.following(b, [0], WIDTH)
        return self._clock() - began

    def _verification(self, q: int) -> float:
        """With the picks that are made with it, the reading of drafts, and what a drafter makes of these.

        A pick that is made only when it is asked for is left out: it is paid for by the token, in plain
        decoding as well, and so has no say in what pays.
        """
        token, probes, began = self._token, min(q - 1, PROBES), self._clock()
        tree = Tree.chain(token, [token] * (q - 1 - probes), probes=[token] * probes)
        reading = self._forward(tree)
        walks, walked = self._walks(tree, reading)
        for b, (path, choice) in enumerate(walks if probes else ()):
            found = reading.drafts(b, tree.drafted, WIDTH)
            self._drafter.observe(tree, path, choice, found, q, 0.0)
            self._drafter.propose([choice], left=ROWS[-1])
        took = self._clock() - began
        _, again = self._walks(tree, reading)  # what was made with the forward is looked up
        return took - min(walked, again)

    def _walks(self, tree: Tree, reading: Reading) -> tuple[list[tuple[list[int], int]], float]:
        """Every sequence's path and choice, and the seconds that they took."""
        began = self._clock()
        found = [tree.walk(reading.chooser(b, ())) for b in range(self._batch)]
        return found, self._clock() - began

    def _forward(self, tree: Tree, fed: Sequence[int] | None = None) -> Reading:
        return self._runner.forward([tree] * self._batch, self._requests, self._sampling, fed)


def measure_costs(
    lm: PreTrainedModel, *, batch: int, context: int, sampling: Sampling, static: bool | None = None
) -> Costs:
    """Times of the rows in turns, so that a change of the machine's speed meets them alike. `static` is the
    Runner's.
    """
    bench = Bench(lm, batch=batch, context=context, sampling=sampling, static=static)
    rows, first = list[int](), 0.0
    for q in ROWS:
        last = min(bench.step(q) for _ in range(3))  # the first warms up
        if not first and last > SLOW:
            print("measuring, once, what a forward of several rows costs here ...", file=sys.stderr)
        first = first or last
        rows.append(q)
        if last > ENOUGH * first and len(rows) > 2:
            break
    turns = max(3, min(15, int(SECONDS / (2 * BURST * first * len(rows)))))
    times = np.array([[bench.burst(q) for q in rows] for _ in range(turns)])
    # Shares of their turn first: a turn on a slow moment of the machine says as much as another.
    shares = np.median(times / times.sum(1, keepdims=True), axis=0)
    ms = 1e3 * np.median(times.sum(1)) * rising(shares)
    return Costs(tuple(rows), tuple(ms.tolist()))


def measure_ratio(
    target: PreTrainedModel, draft: PreTrainedModel, *, batch: int, context: int, sampling: Sampling
) -> float:
    """What a row of a draft model takes, with what may follow it, beside a row of its target, in turns."""
    benches = [
        Bench(target, batch=batch, context=context, sampling=sampling),
        Bench(draft, batch=batch, context=context, sampling=sampling, drafts=True),
    ]
    for bench in benches:
        bench.burst(1)  # warms up
    times = np.array([[bench.burst(1) for bench in benches] for _ in range(TURNS)])
    return agreed_value(target, float(np.median(times[:, 1] / times[:, 0])))


def rising(values: Sequence[float]) -> np.ndarray:
    """The nearest values that never fall (isotonic regression, by pooling adjacent violators): more
    rows never cost less, and where they seem to, that is the clock's noise.
    """
    means, counts = list[float](), list[int]()
    for value in values:
        means.append(value)
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            total = means[-2] * counts[-2] + means[-1] * counts[-1]
            counts[-2:] = [counts[-2] + counts[-1]]
            means[-2:] = [total / counts[-1]]
    return np.repeat(means, counts)


class LoopCosts:
    """Milliseconds of a step by rows, up to `most`: `ms[q]` is L(q), `slopes[q]` the price of the next row."""

    def __init__(self, costs: Costs, most: int) -> None:
        self._rows, self._points, self._most = costs.rows, list(costs.ms), most
        self._plain: float | None = None  # milliseconds of a plain step of late, by the loop's clock
        self.reading = 0.0  # milliseconds, of answers, beyond L(q)
        self._steps, self._since, self._burst = 0, EVERY - 1, 0
        self._lay_out()

    @property
    def due(self) -> bool:
        """Whether the next step is to be plain. It changes when a step is observed, so that all sequences of a
        batch are told the same.
        """
        return self._since >= EVERY

    def __call__(self, q: int) -> float:
        """L(q); a batch may have more rows than a tree."""
        return self.ms[q] if q <= self._most else Costs(self._rows, tuple(self._points))(q)

    def observe(self, q: int, ms: float, *, answered: bool = False) -> float:
        """Learn that a step of q rows took `ms`, in it the reading of adaptive tokens' answers where there were
        some; return its time in plain steps.
        """
        ms = max(ms, 1e3 * FINE)  # by no clock is it free
        if q == 1:
            return self._follow(ms)
        self._since, self._burst = self._since + 1, 0
        if self._plain is None:
            return self(q) / self.ms[1]
        spent = ms / self._plain
        expected = self(q) + (self.reading if answered else 0.0)
        surprise = min(max(spent * self.ms[1] / expected, 1 / WILD), WILD) - 1
        if answered:
            self.reading = max(0.0, self.reading + LEARNED * surprise * expected)
        for point, share in self._beside(q):
            self._points[point] *= 1 + LEARNED * share * surprise
        self._steps += 1
        if self._steps % LAID_OUT == 0:
            self._lay_out()
        return min(spent, COLD * expected / self.ms[1])

    def _follow(self, ms: float) -> float:
        """A plain step took `ms`: among its like, as in plain decoding, it finds the caches as it left them."""
        self._burst += 1
        if self._burst >= BURST:
            self._since = 0
        if self._burst > 1:
            known = ms if self._plain is None else self._plain
            self._plain = known + FOLLOWED * (min(ms, WILD * known) - known)
        return 1.0

    def _beside(self, q: int) -> list[tuple[int, float]]:
        """The measured points on both sides of q but the first, and their shares in it."""
        rows = self._rows
        right = min(bisect_left(rows, q), len(rows) - 1)
        if rows[right] <= q:
            return [(right, 1.0)]
        share = (q - rows[right - 1]) / (rows[right] - rows[right - 1])
        return [(right - 1, 1 - share), (right, share)] if right > 1 else [(right, share)]

    def _lay_out(self) -> None:
        costs, ms = Costs(self._rows, tuple(self._points)), [0.0]
        for q in range(1, self._most + 1):
            ms.append(max(ms[-1], costs(q)))  # more rows never cost less
        self.ms, self.slopes = ms, slopes(ms)


def slopes(ms: list[float]) -> list[float]:
    """The price of the next row behind each number of rows: the least per row on the way to any more.

    Where the second row costs as much as a forward and the next six nothing, no row would be bought singly.
    """
    return [min((ms[more] - ms[q]) / (more - q) for more in range(q + 1, len(ms))) for q in range(len(ms) - 1)]
