"""The policy that chooses by measurement: as many drafts and probes as pay on this device.

Two things are known: L(q), the cost of q rows, and how often a candidate of a given weight was
right. With them a step is a purchase. With λ tokens per millisecond earned on the whole,

- a draft with chance p is worth verifying where p > λ (L(q+1) - L(q));
- probes under a node where the path ends with chance e are worth their k rows where
  e h > λ (L(q+k) - L(q)); h = λ L(1+k) - 1 is what it costs to have no draft at hand, since then a
  forward makes one and yields a single token.

That is Dinkelbach's method for a ratio, a step at a time, λ being followed as it goes. How many
probes, k, comes from the same figures: two states, a draft at hand or not, whose long-run rate has a
closed form.

Drafting lives on credit (credit.py), which bounds what it may lose against plain decoding.
"""

from collections.abc import Sequence
from functools import lru_cache
from threading import Lock

from infer.drafters.adaptive import likeliest
from infer.drafters.costs import Costs
from infer.drafters.credit import Credit
from infer.engine.reading import Candidates
from infer.trees.lattice import grow
from infer.trees.token_graph import Drafts

BINS = 12
TRIALS = 400.0  # of a bin that count; older ones fade
STEPS = 100.0  # over which rates are averaged
FORGOTTEN = 0.75  # of what is known of places that are not probed now, from plan to plan, remains
PLANS = (8, 64)  # steps between two plans: at first, at most
MOST = 64  # probes under a node: of more a plan, whose time grows with their cube, takes longer than forwards


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


def best_plan(ms: Sequence[float], accepted: Sequence[float]) -> tuple[float, int]:
    """The best rate, in tokens per millisecond, of chains of drafts, and the probes it takes.

    `ms[q]` is L(q); `accepted[j]` the chance of draft j + 1 where all before it are right. Drafts lead
    to new drafts where the path ends above probes; else a forward has to make them.
    """
    best = (0.0, 1)
    for k in range(1, min(len(accepted), len(ms) - 2) + 1):
        reached, tokens = [1.0], 1.0
        for m in range(1, k + 1):
            reached.append(reached[-1] * accepted[m - 1])
            tokens += reached[-1]
            endings = [a - b for a, b in zip(reached, [*reached[1:], 0.0])]
            covered, rows = 0.0, 1 + m
            for ending in (0.0, *sorted(endings, reverse=True)):
                covered += ending
                if rows < len(ms):
                    rate = (tokens + 1 - covered) / (ms[rows] + (1 - covered) * ms[1 + k])
                    best = max(best, (rate, k))
                rows += k
    return best


def slopes(ms: Sequence[float]) -> list[float]:
    """The price of the next row behind each number of rows: the least per row on the way to any more.
    Where the second row costs as much as a forward and the next six nothing, no row would be bought
    singly.
    """
    return [min((ms[more] - ms[q]) / (more - q) for more in range(q + 1, len(ms))) for q in range(len(ms) - 1)]


@lru_cache(maxsize=64)
def priced(costs: Costs, rows: int) -> tuple[Sequence[float], Sequence[float]]:
    """(L(q) by q, up to so many rows; `slopes` of it), made once for all that learn by the same costs."""
    ms = (0.0, *(costs(q) for q in range(1, rows + 1)))
    return ms, tuple(slopes(ms))


class AutoPolicy:
    """Serves all sequences of a process, in any thread, and goes on learning from one prompt to the next."""

    width = 4

    def __init__(self, costs: Costs, k: int) -> None:
        """`k` is the most probes under a node, as far as so many can be planned."""
        k = min(k, MOST)
        self._lock = Lock()
        self._costs, self.most, self.max_rows = costs, k, max(costs.rows[-1], 1 + k)
        self._ms, self._slopes = priced(costs, self.max_rows)
        self._calibration = Calibration()
        self._accepted, self._seen = [0.5] * k, [0.0] * k
        self._earned = self._spent = 0.0  # tokens and milliseconds of late
        self._steps, self._next_plan = 0, PLANS[0]
        self._credit = Credit(self._ms[1])
        self.k = k
        self._plan()

    def shape(self, root: int, candidates: Candidates | None, left: int) -> tuple[Drafts, Sequence[int], int]:
        """Every draft worth its row, and every node to be probed."""
        with self._lock:
            return *self._shape(root, candidates, left), self.k

    def _shape(self, root: int, candidates: Candidates | None, left: int) -> tuple[Drafts, Sequence[int]]:
        self._steps += 1
        if self._steps == self._next_plan:
            self._plan()
            self._next_plan += min(self._steps, PLANS[1])
        if candidates is None:
            drafts = grow(root, (), (), ())
        else:
            chance = self._calibration.chance
            chances = [[chance(weight) for weight in row] for row in candidates.weights]
            drafts = grow(root, candidates.ids[: left - 1], chances, self._prices)
        return self._probed(drafts) if self._credit.drafting else (drafts, [])

    def learn(self, candidates: Candidates | None, tokens: Sequence[int], rows: int) -> None:
        """Follow the rate, and what became of the candidates."""
        with self._lock:
            self._learn(candidates, tokens, rows)

    def _learn(self, candidates: Candidates | None, tokens: Sequence[int], rows: int) -> None:
        self._account(len(tokens), self._costs(rows))  # in a batch, more rows than a tree may have
        if candidates is None:
            return
        for place, (token, ids, weights) in enumerate(zip(tokens, candidates.ids, candidates.weights)):
            for candidate, weight in zip(ids, weights):
                self._calibration.record(weight, candidate == token)
            self._seen[place] = min(self._seen[place] + 1, STEPS)
            pace = max(1 / STEPS, 1 / (2 + self._seen[place]))
            self._accepted[place] += pace * ((ids[0] == token) - self._accepted[place])

    def _account(self, tokens: int, ms: float) -> None:
        """The rate of late, and whether to draft."""
        if self._credit.drafting:
            fade = 1 - 1 / STEPS
            self._earned, self._spent = fade * self._earned + tokens, fade * self._spent + ms
        self._credit.account(tokens, ms)

    def _plan(self) -> None:
        """How many probes, and what a row costs in tokens."""
        for place in range(self.k, self.most):
            self._seen[place] *= FORGOTTEN
        accepted = list(self._accepted)
        for place in range(1, len(accepted)):
            if self._seen[place] < 4:  # hoped to be like the one before it, or nobody would look
                accepted[place] = accepted[place - 1]
        planned, self.k = best_plan(self._ms, accepted)
        self._rate = max(1 / self._ms[1], planned if self._steps < STEPS else self._earned / self._spent)
        self._bare = self._rate * self._ms[1 + self.k] - 1  # h: tokens lost for want of drafts
        self._prices = [self._rate * slope for slope in self._slopes[1:]]

    def _probed(self, drafts: Drafts) -> tuple[Drafts, Sequence[int]]:
        """The drafts with their sites; fewer drafts where more sites are worth their place, and none
        where the whole does not pay.
        """
        best, count = (0.0, drafts.first(1), [0]), len(drafts.tokens)
        while count > 1:
            fewer = drafts.first(count)
            value, sites, full = self._sites(fewer)
            if value > best[0]:
                best = (value, fewer, sites)
            if not full:
                break
            count //= 2
        return best[1:]

    def _sites(self, drafts: Drafts) -> tuple[float, list[int], bool]:
        """What the step is worth in tokens (h makes it 0 for probes under a lone root), the nodes to
        probe, and whether rows were wanting.
        """
        rows, value, full = len(drafts.tokens), sum(drafts.chances), False
        endings, found = drafts.endings(), list[int]()
        for node in likeliest(drafts, rows):
            gain = endings[node] * self._bare
            full = rows + self.k > self.max_rows
            if full or gain <= self._rate * self.k * self._slopes[rows]:
                break
            found.append(node)
            rows += self.k
            value += gain
        return value - self._rate * self._ms[rows], sorted(found), full
