"""The policy that chooses by measurement: as many drafts and probes as pay on this device.

Two things are known: L(q), the cost of a step of q rows, and how often a candidate of a given weight was right.
With them a step is a purchase. With λ tokens per millisecond earned on the whole,

- a draft with chance p is worth verifying where p > λ (L(q+1) - L(q));
- k probes under a node where the path ends with chance e are worth their rows where e h > λ (L(q+k) - L(q)).
  h is what a step with adaptive answers yields beyond one without, in tokens less λ L(q): both are averaged.

That is Dinkelbach's method for a ratio, a step at a time, λ being followed as it goes. L(q) is measured before
the first text (costs.py), and held against the clock in every step (clock.py).

Drafting lives on credit (credit.py), which bounds what it may lose against plain decoding.
"""

from collections.abc import Sequence
from threading import Lock

from infer.drafters.adaptive import likeliest
from infer.drafters.clock import LoopCosts
from infer.drafters.costs import Costs
from infer.drafters.credit import Credit
from infer.drafters.places import Places
from infer.trees.token_graph import Drafts

BINS = 12
TRIALS = 400.0  # of a bin that count; older ones fade
STEPS = 100.0  # over which rates are averaged
DEEPEST = 16  # drafts in a row
HOPED = 1.0  # h at first, in tokens; where no answers are bought it returns to this, and they are tried again
FORGOTTEN = 400.0  # steps in which it does


class Calibration:
    """How often a candidate of a given weight is right, given that all before it are."""

    def __init__(self) -> None:
        self._trials = [3.0] * BINS
        self._right = [3.0 * (bin_ + 0.5) / BINS for bin_ in range(BINS)]

    def chance(self, weight: float) -> float:
        """Between 0 and 1."""
        bin_ = min(BINS - 1, int(weight * BINS))
        return self._right[bin_] / self._trials[bin_]

    def record(self, weight: float, right: bool) -> None:
        """One candidate's fate."""
        bin_ = min(BINS - 1, int(weight * BINS))
        if self._trials[bin_] >= TRIALS:
            self._trials[bin_] /= 2
            self._right[bin_] /= 2
        self._trials[bin_] += 1
        self._right[bin_] += right


class AutoPolicy:
    """Serves all sequences of a process, in any thread, and goes on learning from one prompt to the next."""

    def __init__(self, costs: Costs, k: int, *, width: int = 1) -> None:
        """Up to `k` probes hang under a node, 0 without adaptive tokens."""
        self._lock = Lock()
        k = min(k, DEEPEST)  # answers for places beyond would never be used
        self.width, self.most, self.max_rows = width, k, max(costs.rows[-1], 1 + k)
        self._costs = LoopCosts(costs, self.max_rows)
        self._calibrations = Calibration(), Calibration()  # of places without and with adaptive answers
        self._earned = self._spent = 0.0  # tokens and milliseconds of late
        self._surplus = [0.0, HOPED]  # of a step without and with answers, in tokens
        self._credit = Credit(self._costs.ms[1])

    def shape(self, places: Places, left: int) -> tuple[Drafts, Sequence[int], int]:
        """Every draft worth its row, and every node to be probed."""
        with self._lock:
            if not self._credit.drafting:
                return places.grow((), depth=0), (), self.most
            calibrations, answered = self._calibrations, places.answered

            def chance(weight: float, place: int) -> float:
                return calibrations[place < answered].chance(weight)

            rate = self._rate
            prices = [rate * slope for slope in self._costs.slopes[1:]]
            drafts = places.grow(prices, depth=min(left - 1, DEEPEST), calibrated=chance)
            return drafts, self._sites(drafts, rate), self.most

    def learn(self, places: Places, tokens: Sequence[int], rows: int, seconds: float) -> None:
        """Follow the costs, the rate, and what became of the candidates."""
        with self._lock:
            ms = self._costs.observe(rows, 1e3 * seconds)
            if self._credit.drafting:
                fade = 1 - 1 / STEPS
                self._earned, self._spent = fade * self._earned + len(tokens), fade * self._spent + ms
                surplus, answered = len(tokens) - self._rate * ms, places.answered > 0
                self._surplus[answered] += (surplus - self._surplus[answered]) / STEPS * 4
                if not answered:
                    self._surplus[1] += (self._surplus[0] + HOPED - self._surplus[1]) / FORGOTTEN
            self._credit.account(len(tokens), ms)
            self._calibrate(places, tokens)

    @property
    def _rate(self) -> float:
        """λ; plain decoding's at least."""
        plain = 1 / self._costs.ms[1]
        return max(plain, self._earned / self._spent) if self._spent else plain

    def _calibrate(self, places: Places, tokens: Sequence[int]) -> None:
        graph, node = places.graph, 0
        for place, token in enumerate(tokens):
            children = graph.children[node]
            for child in children:
                right = graph.tokens[child] == token
                self._calibrations[place < places.answered].record(graph.chances[child], right)
            node = next((child for child in children if graph.tokens[child] == token), -1)
            if node < 0:
                break

    def _sites(self, drafts: Drafts, rate: float) -> list[int]:
        """The nodes to probe: those where the path may end, while answers there are worth their rows."""
        rows, k, sites = len(drafts.tokens), self.most, list[int]()
        gain, ms, endings = self._surplus[1] - self._surplus[0], self._costs.ms, drafts.endings()
        for node in likeliest(drafts, rows) if k else ():
            if rows + k > self.max_rows or endings[node] * gain <= rate * (ms[rows + k] - ms[rows]):
                break
            sites.append(node)
            rows += k
        return sorted(sites)
