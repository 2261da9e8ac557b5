"""Budgets: how many levels a draft model drafts, and how many nodes are verified.

Fixed, as in the GSD paper; by families, for verification by ratio; or by measurement, with
the costs, calibration and allowance of estimates.py.
"""

from collections.abc import Sequence

from infer.drafters.estimates import (
    CONSTANTS,
    Calibration,
    Constants,
    StepCosts,
    Throughput,
)
from infer.loop import Verified
from infer.trees.token_graph import Drafts, TokenGraph, unroll, unroll_levels


class FixedBudget:
    """Every level of a draft model, and the likeliest `nodes` of its graph (GSD §5.4).

    A budget serves all sequences of a batch.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self.max_rows = 1 + nodes

    @property
    def drafting(self) -> bool:
        """Whether anything is drafted now."""
        return True

    def chance(self, weight: float) -> float:
        """Return how often a draft with this chance by the draft model is right."""
        return weight

    def deepens(self, level: int, reach: float) -> bool:
        """Return whether to draft a level that a text gets to with chance `reach`."""
        return True

    def verified(self, graph: TokenGraph, *, depth: int) -> Drafts:
        """Return the part of a graph that is verified, down to a depth."""
        return unroll(graph, [0.0] * self._nodes, depth=depth)

    def learn(
        self,
        graph: TokenGraph | None,
        result: Verified,
        seconds: float,
        forwards: int,
        drafting: float,
    ) -> None:
        """Learn from a step of `seconds`, `drafting` of them in the draft's forwards."""


class FamilyBudget(FixedBudget):
    """The same for verification by ratio: level by level, siblings together."""

    def verified(self, graph: TokenGraph, *, depth: int) -> Drafts:
        """Return the tree in which the likeliest nodes of each level have children."""
        return unroll_levels(graph, self._nodes, depth=depth)


class MeasuredBudget(FixedBudget):
    """Levels and nodes of a draft model's graph that pay; learns from text to text.

    A level is drafted if a > λ c, with c the time of a forward of the draft model in
    plain steps and a the chance that the text goes on through the level before it and
    then through one of the level's nodes.
    """

    def __init__(
        self,
        prior: Sequence[float],
        forward: float,
        *,
        constants: Constants = CONSTANTS,
    ) -> None:
        """`forward` is the expected time of the draft's forward in plain steps."""
        super().__init__(constants.max_rows - 1)
        self._pace = constants.min_pace
        self._cap = constants.outlier_cap
        self._costs = StepCosts(prior, constants)
        self._forward = forward
        self._timed = 0
        self._calibration = Calibration(constants)
        self._throughput = Throughput(constants)
        # The chance that a text goes on through a child of a node. It begins high: one
        # who drafts a single level never learns what others are worth.
        self._followed = 0.8
        self._seen = 5

    @property
    def drafting(self) -> bool:
        """Whether an allowance is left and no plain step is due."""
        return self._throughput.drafting and not self._costs.plain_due

    def chance(self, weight: float) -> float:
        """Return the recent share of right ones."""
        return self._calibration.chance(weight)

    def deepens(self, level: int, reach: float) -> bool:
        """See the class. The first level is always drafted: the allowance pays."""
        cost = self._throughput.rate * self._forward
        return level == 0 or reach * self._followed > cost

    def verified(self, graph: TokenGraph, *, depth: int) -> Drafts:
        """Return every node that is worth its row."""
        rate = self._throughput.rate
        prices = [rate * price for price in self._costs.prices[1:]]
        return unroll(
            graph, prices, depth=depth, calibrated=lambda weight, _: self.chance(weight)
        )

    def learn(
        self,
        graph: TokenGraph | None,
        result: Verified,
        seconds: float,
        forwards: int,
        drafting: float,
    ) -> None:
        """See FixedBudget."""
        tokens = result.tokens
        spent = self._costs.observe(result, seconds - drafting)
        expected = self._costs.of(result) + forwards * self._forward
        self._throughput.record(
            len(tokens), expected, spent + self._drafted(forwards, drafting)
        )
        if graph is None:
            return
        for children, right in graph.follow(tokens):
            for child in children:
                self._calibration.record(graph.chances[child], child == right)
            self._seen += 1
            pace = max(self._pace, 1 / self._seen)
            self._followed += pace * ((right is not None) - self._followed)

    def _drafted(self, forwards: int, seconds: float) -> float:
        """Learn from the draft model's forwards. Return their time in plain steps."""
        steps = self._costs.in_plain_steps(seconds)
        if not forwards or steps is None:
            return forwards * self._forward
        each = min(steps / forwards, self._cap * self._forward)
        self._timed += 1
        pace = max(self._pace, 1 / (1 + self._timed))
        self._forward += pace * (each - self._forward)
        return forwards * each
