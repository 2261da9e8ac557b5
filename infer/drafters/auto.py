"""The policy that chooses by measurement: as many drafts and probes as pay on this device.

Two things are known: L(q), the cost of a step of q rows, and how often a candidate of a given weight was right.
With them a step is a purchase. With λ tokens per millisecond earned on the whole,

- a draft with chance p is worth verifying where p > λ (L(q+1) - L(q));
- k probes under a node where the path ends with chance e are worth their rows where e h(k) > λ (L(q+k) - L(q)).

h(k) is what the answers of k adaptive tokens add to the next draft. Now and then a step that has answers is
drafted without them too. With A_m and B_m the chances that the first m drafts are right, with and without (less
the price of their rows in the sums),

    h(k) = E_k - E_0,    E_k = sum_{m <= k} A_m + A_k / B_k sum_{m > k} B_m

That is Dinkelbach's method for a ratio, a step at a time. L(q) is learned from the time of every step
(costs.py). Drafting lives on credit, which bounds what it may lose against plain decoding.
"""

from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any

import numpy as np

from infer.drafters.adaptive import likely_ends
from infer.drafters.costs import Costs, LoopCosts, context_of, work
from infer.drafters.places import Places
from infer.engine.sampling import Sampling
from infer.loop import Verified
from infer.trees.token_graph import Drafts

BINS = 12
TRIALS = 400.0  # of a bin that count; older ones fade
STEPS = 100.0  # over which rates are averaged
DEEPEST = 16  # drafts in a row
WIDTH = 2  # candidates of a place; of sampled text, whose noise costs time, one
COMPARED = (
    8  # every so many steps with answers, the drafts without them are looked at too
)
# steps between two choices of k; of the last so many of them each has a say
PLANNED = 8
SMOOTHED = 4.0
# steps without the most probes after which they are tried; before a few answers none
TRIED = 48
FEW = 4
EXPLORED = (
    6.0,
    0.02,
)  # tokens that trials of probes may cost beside n-grams: at first, and of those emitted
# plain steps: to try again, at first, at most
AGAIN = 2.0
FIRST = 10.0
FULL = 24.0
PUT_ASIDE = 0.01  # of a plain step
SAVED = (
    16,
    4,
)  # steps after which L(q) is saved first, and the factor from one time to the next


class Calibration:
    """How often a candidate of a given weight is right, given that all before it are."""

    def __init__(self) -> None:
        self._trials = [3.0] * BINS
        self._right = [3.0 * (bin_ + 0.5) / BINS for bin_ in range(BINS)]

    def chance(self, weight: float) -> float:
        """Return the estimate, between 0 and 1."""
        bin_ = min(BINS - 1, int(weight * BINS))
        return self._right[bin_] / self._trials[bin_]

    def record(self, weight: float, right: bool) -> None:
        """Record whether one candidate was right."""
        bin_ = min(BINS - 1, int(weight * BINS))
        if self._trials[bin_] >= TRIALS:
            self._trials[bin_] /= 2
            self._right[bin_] /= 2
        self._trials[bin_] += 1
        self._right[bin_] += right


class Credit:
    """What drafting may lose against plain decoding: losses are taken away, gains added, up to a limit. When it
    is used up decoding is plain, and a small share of that time is put aside for the next attempt.
    """

    def __init__(self) -> None:
        self._left = FIRST
        self.drafting = True

    def account(self, tokens: int, spent: float) -> None:
        """Account for a step: the tokens that it emitted, and its time in plain steps."""
        gained = tokens - spent
        if self.drafting:
            self._left = max(
                min(self._left + gained, FULL), -AGAIN
            )  # one slow step is not paid for ever after
            self.drafting = self._left > 0
        else:
            self._left += min(gained, 0.0) + PUT_ASIDE
            self.drafting = self._left > AGAIN


class Saving:
    """Saves tables after 16, 64, 256, ... steps."""

    def __init__(self, save: Callable[..., None] | None) -> None:
        self._save = save
        self._next = SAVED[0]

    def step(self, steps: int, tables: Sequence[Costs]) -> None:
        """Save the tables if so many steps that were learned from are enough."""
        if self._save and steps >= self._next:
            self._next *= SAVED[1]
            self._save(*tables)


class Worth:
    """h(k), by what drafts with answers and without them have been."""

    def __init__(self) -> None:
        self._with = np.zeros((2, DEEPEST))
        self._without = np.zeros((2, DEEPEST))
        self.seen = 0

    def record(self, drafts: Drafts, without: Drafts, prices: Sequence[float]) -> None:
        """Record two drafts for the same step, and what each row of drafts costs, in tokens."""
        self.seen += 1
        pace = max(1 / STEPS, 1 / self.seen)
        for mean, drawn in ((self._with, drafts), (self._without, without)):
            reached = np.zeros((2, DEEPEST))
            for depth, chance, price in zip(
                drawn.depths[1:], drawn.chances[1:], prices
            ):
                reached[:, depth - 1] += chance, chance - price
            mean += pace * (reached - mean)

    def __call__(self, k: int) -> float:
        """Return the estimate in tokens, less what the rows of drafts cost."""
        (A, gains) = self._with
        (B, others) = self._without
        beyond = A[k - 1] / B[k - 1] * others[k:].sum() if B[k - 1] > 1e-3 else 0.0
        return float(gains[:k].sum() + beyond - others.sum())


class AutoPolicy:
    """Serves all sequences of a process, in any thread, and goes on learning from one prompt to the next."""

    def __init__(
        self,
        costs: Costs,
        k: int,
        *,
        width: int = WIDTH,
        save: Callable[[Costs], None] | None = None,
    ) -> None:
        """Hang up to `k` probes under a node, 0 without adaptive tokens. `save` is given L(q) now and then."""
        self._lock = Lock()
        k = min(k, DEEPEST)
        self.width = width
        self.most = k
        self.max_rows = max(costs.rows[-1], 1 + k)
        self._costs = LoopCosts(costs, self.max_rows)
        self._calibrations = (
            Calibration(),
            Calibration(),
        )  # of places without and with adaptive answers
        self._earned = self._spent = 0.0  # tokens and milliseconds of late
        self._worth = Worth()
        self._values = np.zeros(
            k
        )  # of a step with 1, 2, ... probes under a node, in tokens
        self._k = k
        self._steps = 0
        self._answered = 0
        self._unprobed = self._narrow = (
            0  # steps since one with probes, and since one with the most of them
        )
        # tokens, and tokens that trials of probes have cost
        self._emitted = 0
        self._explored = 0.0
        self._credit = Credit()
        self._saving = Saving(save)

    @property
    def tables(self) -> list[Costs]:
        """What was learned of L(q)."""
        return [self._costs.costs]

    @property
    def resting(self) -> bool:
        """Without credit, and where a plain step is due."""
        return not self._credit.drafting or self._costs.due

    def shape(self, places: Places, left: int) -> tuple[Drafts, Sequence[int], int]:
        """Return every draft worth its row, and every node to be probed."""
        with self._lock:
            rate = self._rate
            drafts = self._drafts(places, rate, min(left - 1, DEEPEST))
            if places.answered and places.has_ngrams:
                self._answered += 1
                if self._worth.seen <= FEW or self._answered % COMPARED == 0:
                    without = self._drafts(
                        places.unanswered(), rate, min(left - 1, DEEPEST)
                    )
                    self._worth.record(drafts, without, self._prices(rate))
            elif places.answered:
                self._worth.record(drafts, drafts.first(1), self._prices(rate))
            if self._steps % PLANNED == 0 and self.most:
                for k in range(1, self.most + 1):
                    value = self._probed(drafts, rate, k)[2]
                    self._values[k - 1] += (value - self._values[k - 1]) / SMOOTHED
                self._k = 1 + int(self._values.argmax())
            self._steps += 1
            sites: list[int] = []
            if self.most:
                drafts, sites, _ = self._probed(drafts, rate, self._k)
            self._unprobed = 0 if sites else self._unprobed + 1
            self._narrow = 0 if sites and self._k == self.most else self._narrow + 1
            if self._tries(places.has_ngrams):
                self._unprobed = self._narrow = 0
                drafts = drafts.first(self.max_rows - self.most)
                rows = len(drafts.tokens)
                self._explored += rate * (
                    self._costs.ms[rows + self.most] - self._costs.ms[rows]
                )
                return drafts, likely_ends(drafts, 1), self.most
            return drafts, sites, self._k

    def learn(self, places: Places | None, result: Verified) -> None:
        """Follow the costs, the rate, and what became of the candidates."""
        tokens = result.tokens
        with self._lock:
            self._emitted += len(tokens)
            answered = places is not None and places.answered > 0
            spent = self._costs.observe(
                result.rows, 1e3 * result.seconds, answered=answered
            )
            ms = self._costs(result.rows) + (self._costs.reading if answered else 0.0)
            if self._credit.drafting:
                fade = 1 - 1 / STEPS
                self._earned = fade * self._earned + len(tokens)
                self._spent = fade * self._spent + ms
            self._credit.account(len(tokens), spent)
            if places is not None:
                self._calibrate(places, tokens)
            self._saving.step(self._costs.steps, self.tables)

    def _tries(self, has_ngrams: bool) -> bool:
        """Return whether the most probes are tried now, at a bounded cost where n-grams draft as well."""
        if not self.most:
            return False
        unprobed = self._unprobed >= (TRIED if self._worth.seen > FEW else 0)
        affordable = self._explored < EXPLORED[0] + EXPLORED[1] * self._emitted
        return (unprobed or self._narrow >= TRIED) and (
            affordable or (unprobed and not has_ngrams)
        )

    @property
    def _rate(self) -> float:
        plain = 1 / self._costs.ms[1]
        return max(plain, self._earned / self._spent) if self._spent else plain

    def _drafts(self, places: Places, rate: float, depth: int) -> Drafts:
        calibrations = self._calibrations
        answered = places.answered

        def chance(weight: float, place: int) -> float:
            return calibrations[place < answered].chance(weight)

        prices = [rate * slope for slope in self._costs.slopes[1:]]
        return places.grow(prices, depth=depth, calibrated=chance)

    def _prices(self, rate: float) -> list[float]:
        ms = self._costs.ms
        return [rate * (more - fewer) for fewer, more in zip(ms[1:], ms[2:])]

    def _calibrate(self, places: Places, tokens: Sequence[int]) -> None:
        for place, (children, right) in enumerate(places.graph.follow(tokens)):
            for child in children:
                calibration = self._calibrations[place < places.answered]
                calibration.record(places.graph.chances[child], child == right)

    def _probed(
        self, drafts: Drafts, rate: float, k: int
    ) -> tuple[Drafts, list[int], float]:
        """Return the drafts to verify, the nodes to probe, and the step's worth beyond its rows."""
        best = (drafts, list[int](), float("-inf"))
        count = len(drafts.tokens)
        while count:
            fewer = drafts.first(count)
            sites, value, full = self._sites(fewer, rate, k)
            value += sum(fewer.chances) - rate * self._costs.ms[count]
            if value > best[2]:
                best = fewer, sites, value
            if not full:
                break
            count //= 2
        return best

    def _sites(
        self, drafts: Drafts, rate: float, k: int
    ) -> tuple[list[int], float, bool]:
        """Return the nodes to probe, their worth beyond their rows, and whether rows ran out."""
        rows = len(drafts.tokens)
        sites: list[int] = []
        value = 0.0
        full = False
        worth = self._worth(k) - rate * self._costs.reading
        ms = self._costs.ms
        endings = drafts.endings()
        for node in likely_ends(drafts, rows):
            full = rows + k > self.max_rows
            if full:
                break
            gain = endings[node] * worth - rate * (ms[rows + k] - ms[rows])
            if gain <= 0:
                break
            sites.append(node)
            rows += k
            value += gain
        return sorted(sites), value, full


MOST = (
    64  # policies of a kind: a server may hear of another temperature with every text
)


class Learners:
    """What learns L(q), for each kind, batch, length class and sampling. Nothing in here refers to a model."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._learners: dict[tuple[Hashable, tuple[int, int], Sampling], Any] = {}

    def find(
        self,
        kind: Hashable,
        *,
        batch: int,
        capacity: int,
        sampling: Sampling,
        load: Callable[[], Sequence[Costs]],
        new: Callable[[Sequence[Costs]], Any],
    ) -> Any:
        """Return the one for `batch` texts of up to `capacity` tokens. Where there is none yet, a `new` one
        with what another with the same work learned of L(q), or with what `load` returns.
        """
        texts = (batch, context_of(capacity))
        key = (kind, texts, sampling)
        with self._lock:
            same = (texts, work(sampling))
            alike = [
                other
                for (_, of, way), other in self._learners.items()
                if (of, work(way)) == same
            ]
            learner = self._learners.pop(key, None) or new(
                alike[-1].tables if alike else load()
            )
            self._learners[key] = learner  # now the last to be forgotten
            if len(self._learners) > MOST:
                del self._learners[next(iter(self._learners))]
            return learner


class Policies:
    """The policies of one model; the number of probes and the sources of drafts are their kind."""

    def __init__(self) -> None:
        self._learners = Learners()

    def auto(
        self,
        k: int,
        sources: frozenset[str],
        *,
        sampling: Sampling,
        save: Callable[[Costs], None] | None = None,
        **texts: Any,
    ) -> AutoPolicy:
        """See Learners.find; `save` is given what was learned of L(q), from time to time."""

        def new(tables: Sequence[Costs]) -> AutoPolicy:
            return AutoPolicy(
                tables[0], k, width=1 if sampling.temperature else WIDTH, save=save
            )

        return self._learners.find((k, sources), sampling=sampling, new=new, **texts)
