"""Policies that measure: they draft as much as pays on this device.

By the estimates of estimates.py: L(q), the time of a step of q rows in plain steps, and
how often a candidate is right. With λ tokens per plain step over the recent steps,

- a draft that is right with chance p is verified if p > λ (L(q+1) - L(q));
- k probes hang under a node at which the accepted path ends with chance e if
  e h(k) > λ (L(q+k) - L(q)).

This is Dinkelbach's method for the ratio tokens / time, one iteration per step. h(k) is
the number of tokens that the answers of k adaptive tokens add to the next draft. Now
and then a step that has answers is drafted without them too. With A_m and B_m the
chances that the first m drafts are right, with and without answers,

    h(k) = E_k - E_0,    E_k = sum_{m <= k} A_m + A_k / B_k sum_{m > k} B_m

where the price of the drafts' rows is deducted from the terms of the sums. An allowance
bounds what drafting may lose against plain decoding. When it is used up steps are plain,
and drafts that are made but not verified show whether it pays again.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from threading import Lock

import numpy as np

from infer.drafters.adaptive import likely_ends
from infer.drafters.estimates import (
    CONSTANTS,
    Calibration,
    Constants,
    ProbeGain,
    StepCosts,
    Throughput,
    prior_costs,
)
from infer.drafters.places import Places
from infer.loop import Verified
from infer.trees.token_graph import Drafts


class MeasuredPolicy:
    """Serves all sequences of a process, in any thread, and learns from text to text.

    Up to `k` probes hang under a node, 0 without adaptive tokens.
    """

    def __init__(
        self,
        prior: Sequence[float],
        k: int,
        *,
        constants: Constants = CONSTANTS,
    ) -> None:
        self._constants = constants
        self._lock = Lock()
        self.max_probes = min(k, constants.max_depth)
        self.max_rows = max(constants.max_rows, 1 + self.max_probes)
        self.width = constants.width
        self.costs = StepCosts(prior, constants)
        self._throughput = Throughput(constants)
        self._gain = ProbeGain(constants)
        # Of places without and with answers of adaptive tokens.
        self._calibrations = (Calibration(constants), Calibration(constants))
        self._answered = 0
        self._since_trial = 0
        self._emitted = 0
        self._trial_cost = 0.0
        self._trial_steps = 0.0  # of the present step, in plain steps

    @property
    def resting(self) -> bool:
        """Whether the next step is plain: no allowance is left, or its time is due."""
        return not self._throughput.drafting or self.costs.plain_due

    def shape(self, places: Places, left: int) -> tuple[Drafts, Sequence[int], int]:
        """Return the drafts that pay, the nodes to probe, and the probes under each."""
        constants = self._constants
        with self._lock:
            drafts = self._drafts(places, left)
            if places.answered:
                self._answered += 1
                if (
                    self._gain.comparisons <= constants.first_answers
                    or self._answered % constants.compare_every == 0
                ):
                    without = self._drafts(places.unanswered(), left)
                    self._gain.record(drafts, without, self._row_prices())
            if not self.max_probes:
                return drafts, [], 0
            sites, k = self._sites(drafts)
            self._since_trial += 1
            if self._trial_due():
                k = self.max_probes
                sites = likely_ends(drafts, 1)
                price = self._price(len(drafts.tokens), k, probing=True)
                self._trial_cost += price
                self._trial_steps += price / self._throughput.rate
            if sites and k == self.max_probes:
                self._since_trial = 0
            return drafts, sorted(sites), k

    def imagine(self, places: Places, left: int) -> Drafts | None:
        """Return what would be drafted now; None unless the allowance is used up."""
        if self._throughput.drafting:
            return None
        with self._lock:
            return self._drafts(places, min(left, 1 + self._constants.look_every))

    def learn_imagined(
        self, places: Places, drafts: Drafts, tokens: Sequence[int]
    ) -> bool:
        """Learn from an unverified draft, if all its places have their token by now."""
        if len(tokens) < self._constants.look_every:
            return False
        with self._lock:
            drafted = set(drafts.nodes)
            accepted = sum(node in drafted for node in self._calibrate(places, tokens))
            self._throughput.imagine(1 + accepted - self.costs(len(drafts.tokens)))
        return True

    def learn(self, places: Places | None, result: Verified, seconds: float) -> None:
        """Learn from the time and the tokens of a step."""
        tokens = result.tokens
        with self._lock:
            self._emitted += len(tokens)
            spent = self.costs.observe(result, seconds)
            # Trials have a budget of their own: they must not end other drafts.
            trial = self._trial_steps
            self._trial_steps = 0.0
            expected = self.costs.of(result)
            self._throughput.record(len(tokens), expected - trial, spent - trial)
            if places is not None:
                self._calibrate(places, tokens)

    def _calibrate(self, places: Places, tokens: Sequence[int]) -> list[int | None]:
        """Record which candidates the tokens are. Return each place's, None for none."""
        followed = []
        for place, (children, right) in enumerate(places.graph.follow(tokens)):
            for child in children:
                calibration = self._calibrations[place < places.answered]
                calibration.record(places.graph.chances[child], child == right)
            followed.append(right)
        return followed

    def _drafts(self, places: Places, left: int) -> Drafts:
        constants = self._constants
        # Probes get the other half of the rows.
        rows = constants.max_rows // 2 if self.max_probes else constants.max_rows
        rate = self._throughput.rate
        prices = [rate * price for price in self.costs.prices[1:rows]]
        calibrations = self._calibrations
        answered = places.answered

        def chance(weight: float, place: int) -> float:
            return calibrations[place < answered].chance(weight)

        depth = min(left - 1, constants.max_depth)
        return places.grow(prices, depth=depth, calibrated=chance)

    def _row_prices(self) -> list[float]:
        """Return the price of each row but the first in tokens."""
        rate = self._throughput.rate
        curve = self.costs.curve
        return [rate * (more - fewer) for fewer, more in zip(curve[1:], curve[2:])]

    def _price(self, rows: int, added: int, *, probing: bool = False) -> float:
        """Return the price in tokens of rows beyond those that a step has."""
        cost = self.costs(rows + added) - self.costs(rows)
        return self._throughput.rate * (cost + probing * self.costs.probing)

    def _sites(self, drafts: Drafts) -> tuple[list[int], int]:
        """Return the nodes to probe, and the number of probes under each."""
        rows = len(drafts.tokens)
        endings = drafts.endings()
        order = likely_ends(drafts, rows)
        likeliest = endings[order[0]]
        profits = [
            likeliest * self._gain.gains[k - 1] - self._price(rows, k)
            for k in range(1, self.max_probes + 1)
        ]
        k = 1 + int(np.argmax(profits))
        # One site alone may not be worth the adapter: all of them share it.
        profit = -self._throughput.rate * self.costs.probing
        best = 0.0
        sites = 0
        for count, node in enumerate(order, start=1):
            if rows + k > self.max_rows:
                break
            profit += endings[node] * self._gain.gains[k - 1] - self._price(rows, k)
            rows += k
            if profit > best:
                best = profit
                sites = count
        return order[:sites], k

    def _trial_due(self) -> bool:
        constants = self._constants
        collecting = self._gain.comparisons <= constants.first_answers
        allowed = constants.trial_tokens + constants.trial_share * self._emitted
        waited = collecting or self._since_trial >= constants.trial_every
        return waited and self._trial_cost < allowed


def remember_policies() -> Callable[..., MeasuredPolicy]:
    """Return a function that finds the policy of one kind of texts, a new one at first.

    Its arguments are those of `_new_policy`. Policies learn from text to text.
    """
    return lru_cache(64)(_new_policy)


def _new_policy(device: str, k: int, *texts: Hashable) -> MeasuredPolicy:
    """Return a policy for a device's type, with up to `k` probes under a node.

    `texts` tell apart texts whose rows cost differently, or whose drafts do.
    """
    return MeasuredPolicy(prior_costs(device), k)


def length_class(capacity: int) -> int:
    """Return the class of texts of up to `capacity` tokens whose rows cost alike."""
    return min(4096, max(512, 1 << (capacity - 1).bit_length()))
