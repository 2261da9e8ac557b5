"""Milliseconds of a decoding step by the rows of its forward, measured: L(q) of reports and benchmarks.

The time is that of a loop's whole step: the forward, the picks that are made with it, and the reading of the
drafts, which of sampled text takes longer. Decoding itself measures nothing beforehand (drafters/costs.py).
"""

import statistics
import sys
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedModel

from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.costs import ROWS, Costs
from infer.engine.forward import agreed_value, context_length
from infer.engine.reading import Reading, Request
from infer.engine.runner import FINE, Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Verified
from infer.trees.tree import Tree

ENOUGH = 4.0  # times L(1): no number of accepted drafts pays for more rows than that
SECONDS = 3.0  # approximate time of a measurement
BURST = 4  # consecutive steps of the same rows
PROBES, WIDTH = 4, 4  # whose drafts are read, candidates of each
SLOW = 0.3  # seconds of a forward from which the wait is announced


def context_for(capacity: int, lm: PreTrainedModel) -> int:
    """Return the context to measure at for texts of up to `capacity` tokens: about half of it, within the
    model's positions.
    """
    half = min(4096, max(512, 2 ** (capacity - 1).bit_length())) // 2
    return min(half, context_length(lm.config))


class StepTimer:
    """Steps of a decoding loop on a model, against the clock."""

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        batch: int,
        context: int,
        sampling: Sampling = GREEDY,
        static: bool | None = None,
    ) -> None:
        self._lm = lm
        self._runner = Runner(lm, capacity=context, max_rows=ROWS[-1], batch=batch, static=static)
        self._sampling = sampling
        # What it proposes is not fed: only the rows that are asked for are. But drawing it takes its time.
        self._drafter = AdaptiveDrafter([0], FixedPolicy(PROBES, nodes=PROBES, width=WIDTH))
        self._clock = self._runner.clock
        self._batch, self._token = batch, lm.config.vocab_size // 2
        self._requests = [Request([self._token])] * batch
        # All rows fit the same columns, so that fixed shapes of the cache are the same for one row and many;
        # theirs have as many drafts as the most rows, and probes beside these.
        self._runner.prefill([[self._token] * (context - ROWS[-1] - PROBES)] * batch)

    def burst(self, q: int) -> float:
        """Measure the seconds of a step among its like, as steps of plain decoding are: after another number of
        rows the processor's caches are not as a step of its kind leaves them.
        """
        return statistics.median([self.step(q) for _ in range(BURST)][1:])

    def step(self, q: int) -> float:
        """Measure the seconds of a forward of q rows in each sequence, and of all that comes with it."""
        return agreed_value(self._lm, max(self._verification(q), FINE))  # by no clock is it free: costs divide

    def _verification(self, q: int) -> float:
        """Run the forward with the picks that are made with it, the reading of drafts, and what a drafter makes
        of these.

        A pick that is made only when it is asked for is left out: it is paid for by the token, in plain
        decoding as well, and so has no say in what pays.
        """
        token, probes, began = self._token, min(q - 1, PROBES), self._clock()
        tree = Tree.chain(token, [token] * (q - 1 - probes), probes=[token] * probes)
        reading = self._forward(tree)
        walks, walked = self._walks(tree, reading)
        for b, (path, choice) in enumerate(walks if probes else ()):
            answers = reading.drafts(b, tree.drafted, WIDTH)
            self._drafter.observe(Verified(tree, path, choice, answers, q, 0.0))
            self._drafter.propose([choice], left=ROWS[-1])
        took = self._clock() - began
        _, again = self._walks(tree, reading)  # what was made with the forward is looked up
        return took - min(walked, again)

    def _walks(self, tree: Tree, reading: Reading) -> tuple[list[tuple[list[int], int]], float]:
        """Return every sequence's path and choice, and the seconds that they took."""
        began = self._clock()
        walks = [tree.walk(reading.chooser(b, ())) for b in range(self._batch)]
        return walks, self._clock() - began

    def _forward(self, tree: Tree) -> Reading:
        return self._runner.forward([tree] * self._batch, self._requests, self._sampling)


def measure_costs(
    lm: PreTrainedModel, *, batch: int, context: int, sampling: Sampling, static: bool | None = None
) -> Costs:
    """Measure the times of rows in turns, so that a change of the machine's speed affects all alike."""
    bench = StepTimer(lm, batch=batch, context=context, sampling=sampling, static=static)
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


def rising(values: Sequence[float]) -> np.ndarray:
    """Return the nearest values that never fall (isotonic regression, by pooling adjacent violators): more
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
