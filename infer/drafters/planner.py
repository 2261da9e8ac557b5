"""Decide how much to draft, how much of it to verify, and where to attach probes.

A planner serves every source of drafts (source.py). FixedPlanner takes a fixed number of
nodes. MeasuredPlanner drafts as much as pays on this device, by the estimates of costs.py:
L(q), the time of a step of q rows in plain steps, and how often a candidate is right.
With λ tokens per plain step over the recent steps,

- a draft that is right with probability p is verified if p > λ (L(q+1) - L(q));
- k probes are attached to a node at which the accepted path ends with probability e if
  e h(k) > λ (L(q+k) - L(q));
- a draft model drafts another level if a > λ c. Here c is the time of one of its forwards
  and a the probability that the text continues through the previous level and then
  through one of the new level's nodes.

This is Dinkelbach's method for the ratio tokens / time, one iteration per step. h(k) is
the number of tokens that the answers of k adaptive tokens add to the next draft. To
measure it, some steps are also drafted with fewer answers than they have. With P_j the
tokens that the draft with the first j answers adds to the text, less its rows' price,

    h(k) = sum_{j <= k} mean(P_j - P_{j-1}), over the steps with at least j answers.

The P_j are expectations given all answers of the step.

An allowance bounds how much drafting may lose against plain decoding. When it is used up,
steps are plain, and drafts that are made but not verified show whether drafting pays again.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from threading import Lock
from typing import Protocol

from infer.drafters.costs import (
    CONSTANTS,
    Calibration,
    Constants,
    DraftForwards,
    ProbeGain,
    StepCosts,
    StepTime,
    Throughput,
    prior_costs,
)
from infer.drafters.source import KINDS, DraftGraph, LevelPlanner
from infer.loop import Verified
from infer.trees.nucleus import nucleus_shape, nucleus_tree
from infer.trees.token_graph import Drafts, unroll, unroll_levels

#: Drafts, the nodes to probe in ascending order, and the probes under each.
Plan = tuple[Drafts, Sequence[int], int]
#: Forms of a fixed tree: the likeliest nodes; all children of a node or no child, as
#: verification by ratio requires (pick.py); the published shape (SDSAT §3.4.2).
LIKELIEST = "likeliest"
FAMILIES = "families"
PAPER = "paper"


class Planner(LevelPlanner, Protocol):
    """Decide how much a source drafts and how much of it is verified."""

    @property
    def max_rows(self) -> int:
        """Return the number of rows of the largest tree."""

    @property
    def max_probes(self) -> int:
        """Return the largest number of probes under a node."""

    @property
    def width(self) -> int:
        """Return the number of candidates per place of a graph that grows on demand."""

    @property
    def drafting(self) -> bool:
        """Return True if the next step has drafts, False for a plain step."""

    def plan(self, graph: DraftGraph, left: int) -> Plan:
        """Return the drafts, at most `left` - 1 deep, and the nodes to probe."""

    def learn(self, graph: DraftGraph | None, result: Verified, time: StepTime) -> None:
        """Learn from a step, its graph (None in a plain step), and its time."""

    def dry_run(self, graph: DraftGraph, left: int) -> Drafts | None:
        """Return drafts that are not verified, to estimate their gain; None to skip."""

    def learn_dry_run(
        self, graph: DraftGraph, drafts: Drafts, tokens: Sequence[int]
    ) -> bool:
        """Learn from these drafts and the tokens since then; return False if too few."""


@dataclass(frozen=True)
class FixedPlanner:
    """Verify a fixed tree of up to `nodes` drafts (default k); draft all levels.

    `probes` selects the nodes with up to `k` probes each: "root" (the paper's two forwards),
    "all", or a number of nodes, taken by their probability to end the accepted path. `form`
    is the tree's form, one of the constants above.
    """

    k: int = 0
    probes: str | int = "root"
    nodes: int | None = None
    width: int = 1
    form: str = LIKELIEST

    drafting = True

    @property
    def max_probes(self) -> int:
        """See Planner."""
        return self.k

    @property
    def drafted(self) -> int:
        """Return the largest number of drafts in a tree."""
        if self.form == PAPER:
            return len(nucleus_shape(self.k))
        return self.nodes or self.k

    @property
    def max_rows(self) -> int:
        """See Planner."""
        sites = {"root": 0, "all": 1 + self.drafted}.get(str(self.probes), self.probes)
        sites = min(int(sites), 1 + self.drafted)
        return max(1 + self.k, 1 + self.drafted + self.k * sites)

    def chance(self, weight: float) -> float:
        """See LevelPlanner: returns the draft model's own probability."""
        return weight

    def deepens(self, level: int, reach: float) -> bool:
        """See LevelPlanner: always True."""
        return True

    def plan(self, graph: DraftGraph, left: int) -> Plan:
        """See Planner. With probes="root", probe only if the graph has no answers."""
        drafts = self._drafts(graph, left - 1)
        if not self.k:
            return drafts, [], 0
        count = len(drafts.tokens)
        if self.probes == "root":
            return drafts, [] if graph.answered else likely_ends(drafts, 1), self.k
        sites = likely_ends(drafts, count if self.probes == "all" else int(self.probes))
        return drafts, sorted(sites), self.k

    def _drafts(self, graph: DraftGraph, depth: int) -> Drafts:
        if self.form == PAPER:
            return nucleus_tree(graph.graph, min(self.k, depth), graph.expand)
        if self.form == FAMILIES:
            return unroll_levels(graph.graph, self.drafted, depth=depth)
        prices = [0.0] * self.drafted
        return unroll(graph.graph, prices, depth=depth, expand=graph.expand)

    def learn(self, graph: DraftGraph | None, result: Verified, time: StepTime) -> None:
        """Do nothing: the tree is fixed."""

    def dry_run(self, graph: DraftGraph, left: int) -> None:
        """Return None: every step has drafts."""

    def learn_dry_run(
        self, graph: DraftGraph, drafts: Drafts, tokens: Sequence[int]
    ) -> bool:
        """Do nothing: the tree is fixed."""
        return True


class MeasuredPlanner:
    """Serve all sequences of a process, in any thread, and keep learning across texts.

    A node has up to `k` probes; k is 0 without adaptive tokens. `forward` is the expected
    time of a draft model's forward in plain steps, None without a draft model.
    """

    def __init__(
        self,
        prior: Sequence[float],
        k: int = 0,
        *,
        forward: float | None = None,
        constants: Constants = CONSTANTS,
    ) -> None:
        self._constants = constants
        self._lock = Lock()
        self.max_probes = min(k, constants.max_depth)
        self.max_rows = max(constants.max_rows, 1 + self.max_probes)
        self.width = constants.width
        self.costs = StepCosts(prior, constants)
        self._forwards = None if forward is None else DraftForwards(forward, constants)
        self._throughput = Throughput(constants)
        self._gain = ProbeGain(constants)
        # By the kind of a candidate.
        self._calibrations = [Calibration(constants) for _ in range(KINDS)]
        self._since_comparison = 0
        self._k = 0  # probes after the likeliest end in the last step
        self._since_trial = 0
        self._emitted = 0
        self._trial_cost = 0.0
        self._trial_steps = 0.0  # of the present step, in plain steps

    @property
    def drafting(self) -> bool:
        """See Planner: False if the allowance is used up or a plain step is due."""
        return self._throughput.drafting and not self.costs.plain_due

    def chance(self, weight: float) -> float:
        """See LevelPlanner: the recent rate of right drafts."""
        return self._calibrations[0].chance(weight)

    def deepens(self, level: int, reach: float) -> bool:
        """See LevelPlanner. Always draft the first level, at the allowance's cost."""
        forwards = self._forwards
        assert forwards is not None
        cost = self._throughput.rate * forwards.time
        return level == 0 or reach * forwards.followed > cost

    def plan(self, graph: DraftGraph, left: int) -> Plan:
        """See Planner."""
        with self._lock:
            drafts = self._drafts(graph, left)
            self._compare(graph, drafts, left)
            drafts = self._best_part(drafts)
            if not self.max_probes:
                return drafts, [], 0
            sites, k = self._sites(drafts)
            self._since_trial += 1
            longer = self._longer(len(drafts.tokens), k)
            if self._trial_due(longer):
                k = longer
                sites = likely_ends(drafts, 1)
                price = self._price(len(drafts.tokens), k, probing=True)
                self._trial_cost += price
                self._trial_steps += price / self._throughput.rate
            if sites and k == longer:
                self._since_trial = 0
            return drafts, sorted(sites), k

    def learn(self, graph: DraftGraph | None, result: Verified, time: StepTime) -> None:
        """See Planner."""
        tokens = result.tokens
        with self._lock:
            self._emitted += len(tokens)
            if time.first:
                self.costs.observe(result, time.seconds - time.drafting)
            spent = self.costs.of(result)
            if forwards := self._forwards:
                steps = None
                if time.first:
                    steps = self.costs.in_plain_steps(time.drafting)
                spent += forwards.observe(time.forwards, steps)
            # Trials have their own budget, so they must not use up the allowance.
            self._throughput.record(len(tokens), spent - self._trial_steps)
            self._trial_steps = 0.0
            if graph is not None:
                self._calibrate(graph, tokens)

    def dry_run(self, graph: DraftGraph, left: int) -> Drafts | None:
        """See Planner: None unless the allowance is used up."""
        if self._throughput.drafting:
            return None
        with self._lock:
            depth = min(left, 1 + self._constants.dry_run_every)
            return self._best_part(self._drafts(graph, depth))

    def learn_dry_run(
        self, graph: DraftGraph, drafts: Drafts, tokens: Sequence[int]
    ) -> bool:
        """See Planner: learns once all places have their token."""
        if len(tokens) < self._constants.dry_run_every:
            return False
        with self._lock:
            drafted = set(drafts.nodes)
            accepted = sum(node in drafted for node in self._calibrate(graph, tokens))
            gain = 1 + accepted - self.costs(len(drafts.tokens))
            self._throughput.record_dry_run(gain)
        return True

    def _calibrate(self, graph: DraftGraph, tokens: Sequence[int]) -> list[int | None]:
        """Record which candidates were right; return each token's node or None."""
        followed = []
        chances = graph.graph.chances
        for children, right in graph.graph.follow(tokens):
            for child in children:
                calibration = self._calibrations[graph.kind(child)]
                calibration.record(chances[child], child == right)
            if self._forwards:
                self._forwards.record(right is not None)
            followed.append(right)
        return followed

    def _drafts(self, graph: DraftGraph, left: int) -> Drafts:
        constants = self._constants
        # With probes, drafts get half of the rows and probes the other half.
        rows = constants.max_rows // 2 if self.max_probes else constants.max_rows
        rate = self._throughput.rate
        prices = [rate * price for price in self.costs.prices[1:rows]]
        # A graph that grows on demand has no depth limit; a draft model's graph has one.
        depth = left - 1
        if self._forwards is None:
            depth = min(depth, constants.max_depth)
        calibrated = partial(self._chance, graph)
        return unroll(
            graph.graph, prices, depth=depth, expand=graph.expand, calibrated=calibrated
        )

    def _compare(self, graph: DraftGraph, drafts: Drafts, left: int) -> None:
        """Compare the drafts with drafts of fewer answers now and then."""
        self._since_comparison += 1
        due = self._since_comparison >= self._constants.compare_every
        if graph.answered and (due or self._collecting(graph.answered)):
            self._since_comparison = 0
            fewer = map(graph.answering, range(graph.answered))
            compared = [*(self._drafts(part, left) for part in fewer), drafts]
            self._gain.record([self._profit_in(graph, part) for part in compared])

    def _profit_in(self, graph: DraftGraph, drafts: Drafts) -> float:
        """Return the expected tokens of the first drafts that pay, less the price of the step.

        The chances are taken from `graph`, which may know more answers than the drafts' own
        graph: without answers, drafts may have too high chances.
        """
        rows = 1 + _largest(self._profits(drafts))
        nodes: list[int | None] = [0]
        chances = [1.0]
        for token, parent in zip(drafts.tokens[1:rows], drafts.parents[1:rows]):
            node = nodes[parent]
            if node is not None:
                if not graph.graph.children[node]:
                    graph.expand(node)
                node = graph.graph.child(node, token)
            nodes.append(node)
            right = 0.0 if node is None else self._chance(graph, node)
            chances.append(chances[parent] * right)
        return sum(chances) - self._throughput.rate * self.costs(rows)

    def _chance(self, graph: DraftGraph, node: int) -> float:
        """Return how often a candidate like this node is right."""
        return self._calibrations[graph.kind(node)].chance(graph.graph.chances[node])

    def _best_part(self, drafts: Drafts) -> Drafts:
        """Return the first drafts, as many as pay: prices hold only if all cheap rows are used.

        Probes after the likeliest end are rows too: beside them drafts may pay that do not
        pay alone.
        """
        rate = self._throughput.rate
        best, most = drafts, -math.inf
        for k in {0, self._k}:
            profits = self._profits(drafts, k)
            rows = 1 + _largest(profits)
            part, profit = drafts.first(rows), profits[rows - 1]
            if k:
                gain = max(part.endings()) * self._gain.gains[k - 1]
                profit += gain - rate * self.costs.probing
            if profit > most:
                best, most = part, profit
        return best

    def _profits(self, drafts: Drafts, probes: int = 0) -> list[float]:
        """Return for the first 1, 2, ... rows the expected tokens, less the price of the step."""
        rate = self._throughput.rate
        costs = self.costs.times(1 + probes, len(drafts.chances))
        return [
            tokens - rate * cost
            for tokens, cost in zip(accumulate(drafts.chances), costs)
        ]

    def _price(self, rows: int, added: int, *, probing: bool = False) -> float:
        """Return the price in tokens of adding rows to a step that has `rows`."""
        cost = self.costs(rows + added) - self.costs(rows)
        return self._throughput.rate * (cost + probing * self.costs.probing)

    def _sites(self, drafts: Drafts) -> tuple[list[int], int]:
        """Return the nodes to probe, and the number of probes under each."""
        rows = len(drafts.tokens)
        endings = drafts.endings()
        order = likely_ends(drafts, rows)
        likeliest = endings[order[0]]
        rate = self._throughput.rate
        before, *after = self.costs.times(rows, 1 + self.max_probes)
        profits = [
            likeliest * gain - rate * (cost - before)
            for gain, cost in zip(self._gain.gains, after)
        ]
        k = self._k = 1 + _largest(profits)
        # The sites share the cost of the adapter: several may pay where one does not.
        profit = -rate * self.costs.probing
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

    def _longer(self, rows: int, k: int) -> int:
        """Return the probes of a trial: twice as many as `k`, more if they were tried or are cheap."""
        longer = min(2 * k, self.max_probes)
        while longer < self.max_probes and (
            not self._collecting(longer)
            or self._price(rows, longer + 1) < self._constants.trial_price
        ):
            longer += 1
        return longer

    def _collecting(self, k: int) -> bool:
        """Return whether few answers of k adaptive tokens were compared."""
        known = self._gain.answers[min(k, self._constants.max_depth) - 1]
        return bool(known < self._constants.first_answers)

    def _trial_due(self, k: int) -> bool:
        constants = self._constants
        allowed = constants.trial_tokens + constants.trial_share * self._emitted
        waited = self._collecting(k) or self._since_trial >= constants.trial_every
        return waited and self._trial_cost < allowed


def _largest(values: list[float]) -> int:
    """Return the index of the first largest value. Of few values it is faster than np.argmax."""
    return values.index(max(values))


def likely_ends(drafts: Drafts, count: int) -> list[int]:
    """Return the `count` likeliest ends of the accepted path, the likeliest first."""
    endings = drafts.endings()
    return sorted(range(len(endings)), key=endings.__getitem__, reverse=True)[:count]


def remember_planners() -> Callable[..., MeasuredPlanner]:
    """Return a cached `_new_planner`: the same arguments return the same planner.

    A planner keeps learning from text to text.
    """
    return lru_cache(64)(_new_planner)


def _new_planner(
    device: str, k: int, forward: float | None, *texts: Hashable
) -> MeasuredPlanner:
    """Return a planner for a type of device; `k` and `forward` as in MeasuredPlanner.

    `texts` is only a cache key: it separates texts with different costs of rows or drafts.
    """
    return MeasuredPlanner(prior_costs(device), k, forward=forward)


def length_class(capacity: int) -> int:
    """Return the length class of texts of up to `capacity` tokens.

    The rows of texts of one class cost about the same.
    """
    return min(4096, max(512, 1 << (capacity - 1).bit_length()))
