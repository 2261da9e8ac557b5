"""How deep a draft model drafts, and how much of its graph is verified.

Fixed, after the paper; or by measurement. With λ tokens per millisecond earned on the whole,

- a node that is right with chance p is worth verifying where p > λ (L(q+1) - L(q)), L(q) being the
  target's cost of q rows;
- another level of q rows is worth drafting where a > λ L'(q), L' being the draft model's cost and a the chance
  that the text goes on through the frontier and then through a child of it.

The draft model's probabilities are calibrated to how often such drafts were right. Drafting lives on
credit (auto.py); that the draft model reads the text, where it drafts for it, comes on top.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from infer.drafters.auto import STEPS, Calibration, Credit
from infer.drafters.costs import Costs, slopes
from infer.trees.token_graph import Drafts, TokenGraph, unroll, unroll_levels

PACE = 0.05  # of what is followed as it goes: the last twenty steps or so count
HOPED, HASTE = 0.8, 5  # at first, since who drafts one level only never sees what more are worth


class Budget(Protocol):
    """Serves all sequences of a batch."""

    @property
    def max_rows(self) -> int:
        """Nodes of the largest verified tree."""
        ...

    @property
    def drafting(self) -> bool:
        """Whether anything is drafted now."""
        ...

    def chance(self, weight: float) -> float:
        """How often drafts are right that have such a chance by the draft model."""
        ...

    def deepens(self, level: int, reach: float, rows: int) -> bool:
        """Whether a level of so many rows is drafted; `reach` is the chance that a text goes on through them,
        the mean of all sequences.
        """
        ...

    def verified(self, graph: TokenGraph, *, depth: int) -> Drafts:
        """What of a graph is verified, down to a depth."""
        ...

    def learn(
        self, graph: TokenGraph | None, tokens: Sequence[int], rows: int, forwards: Sequence[int]
    ) -> None:
        """What a forward of so many rows emitted, what had been drafted for it, and the rows of the draft
        model's forwards.
        """
        ...


@dataclass(frozen=True)
class FixedBudget:
    """Every level, and the likeliest `nodes` of the graph's tree (GSD §5.4)."""

    nodes: int
    drafting = True

    @property
    def max_rows(self) -> int:
        """With the root."""
        return 1 + self.nodes

    def chance(self, weight: float) -> float:
        """The draft model's word."""
        return weight

    def deepens(self, level: int, reach: float, rows: int) -> bool:
        """The graph itself says when it ends."""
        return True

    def verified(self, graph: TokenGraph, *, depth: int) -> Drafts:
        """Best first, by the draft model's probabilities."""
        return unroll(graph, [0.0] * self.nodes, depth=depth)

    def learn(
        self, graph: TokenGraph | None, tokens: Sequence[int], rows: int, forwards: Sequence[int]
    ) -> None:
        """Nothing changes."""


class FamilyBudget(FixedBudget):
    """The same number of nodes for verification by ratio: level by level, siblings together."""

    def verified(self, graph: TokenGraph, *, depth: int) -> Drafts:
        """The likeliest of each level get their children."""
        return unroll_levels(graph, self.nodes, depth=depth)


class AutoBudget:
    """By measurement; goes on learning from one text to the next."""

    def __init__(self, target: Costs, draft: Costs) -> None:
        self._costs, self._draft, self.max_rows = target, draft, target.rows[-1]
        self._slopes = slopes([0.0, *(target(q) for q in range(1, self.max_rows + 1))])[1:]
        self._calibration, self._credit = Calibration(), Credit()
        self._earned, self._spent = 1.0, target(1)  # tokens and milliseconds of late
        self._followed, self._seen = HOPED, 0  # how often the text went on through one of a node's children

    @property
    def drafting(self) -> bool:
        """While there is credit."""
        return self._credit.drafting

    @property
    def rate(self) -> float:
        """λ; plain decoding's at least."""
        return max(self._earned / self._spent, 1 / self._costs(1))

    def chance(self, weight: float) -> float:
        """Of late."""
        return self._calibration.chance(weight)

    def deepens(self, level: int, reach: float, rows: int) -> bool:
        """The first level always: the credit answers for it."""
        return level == 0 or reach * self._followed > self.rate * self._draft(rows)

    def verified(self, graph: TokenGraph, *, depth: int) -> Drafts:
        """Every node that is worth its row."""
        rate = self.rate
        prices = [rate * slope for slope in self._slopes]
        return unroll(graph, prices, depth=depth, calibrated=lambda weight, _: self.chance(weight))

    def learn(
        self, graph: TokenGraph | None, tokens: Sequence[int], rows: int, forwards: Sequence[int]
    ) -> None:
        """Follow the rate, and what became of the candidates."""
        spent = self._costs(rows) + sum(map(self._draft, forwards))
        if self.drafting:
            fade = 1 - 1 / STEPS
            self._earned, self._spent = fade * self._earned + len(tokens), fade * self._spent + spent
        self._credit.account(len(tokens), spent / self._costs(1))
        for behind, right in graph.follow(tokens) if graph else ():
            assert graph is not None
            for child in behind:
                self._calibration.record(graph.chances[child], child == right)
            self._seen += 1
            pace = max(PACE, 1 / (HASTE + self._seen))
            self._followed += pace * ((right is not None) - self._followed)
