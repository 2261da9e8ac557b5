"""How deep a draft model drafts, and how much of its graph is verified.

Fixed, after the paper; or by measurement. With λ tokens per millisecond earned on the whole,

- a node that is right with chance p is worth verifying where p > λ (L(q+1) - L(q)), L(q) being the
  target's cost of q rows;
- another level of q rows is worth drafting where a > λ L'(q), L' being the draft model's cost and a the chance
  that the text goes on through the frontier and then through a child of it.

The draft model's probabilities are calibrated to how often such drafts were right. Drafting lives on
credit (auto.py); that the draft model reads the text, where it drafts for it, comes on top.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from infer.drafters.auto import STEPS, Calibration, Credit, Saving
from infer.drafters.costs import COLD, CostCurve, Costs, LoopCosts, clipped
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
        self,
        graph: TokenGraph | None,
        tokens: Sequence[int],
        rows: int,
        forwards: Sequence[int],
        seconds: float,
        drafting: float,
    ) -> None:
        """What a forward of so many rows emitted, what had been drafted for it, the rows of the draft model's
        forwards, the step's time, and of it that of these forwards.
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
        self,
        graph: TokenGraph | None,
        tokens: Sequence[int],
        rows: int,
        forwards: Sequence[int],
        seconds: float,
        drafting: float,
    ) -> None:
        """Nothing changes."""


class FamilyBudget(FixedBudget):
    """The same number of nodes for verification by ratio: level by level, siblings together."""

    def verified(self, graph: TokenGraph, *, depth: int) -> Drafts:
        """The likeliest of each level get their children."""
        return unroll_levels(graph, self.nodes, depth=depth)


class AutoBudget:
    """By measurement; goes on learning from one text to the next. Both tables have one unit of time."""

    def __init__(
        self, target: Costs, draft: Costs, *, save: Callable[[Costs, Costs], None] | None = None
    ) -> None:
        """`save` is given both tables from time to time."""
        self.max_rows = target.rows[-1]
        self._costs, self._draft = LoopCosts(target, self.max_rows), CostCurve(draft)
        self._calibration, self._credit, self._saving = Calibration(), Credit(), Saving(save)
        self._earned, self._spent = 1.0, target(1)  # recent tokens and time
        self._followed, self._seen = HOPED, 0  # how often the text went on through one of a node's children

    @property
    def tables(self) -> list[Costs]:
        """What was learned of the target's and the draft model's L(q)."""
        return [self._costs.costs, self._draft.costs]

    @property
    def drafting(self) -> bool:
        """While there is credit, but for plain steps that are due."""
        return self._credit.drafting and not self._costs.due

    @property
    def rate(self) -> float:
        """λ; plain decoding's at least."""
        return max(self._earned / self._spent, 1 / self._costs(1))

    def chance(self, weight: float) -> float:
        """Recent share of right ones."""
        return self._calibration.chance(weight)

    def deepens(self, level: int, reach: float, rows: int) -> bool:
        """The first level always: the credit answers for it."""
        return level == 0 or reach * self._followed > self.rate * self._draft.costs(rows)

    def verified(self, graph: TokenGraph, *, depth: int) -> Drafts:
        """Every node that is worth its row."""
        rate = self.rate
        prices = [rate * slope for slope in self._costs.slopes[1:]]
        return unroll(graph, prices, depth=depth, calibrated=lambda weight, _: self.chance(weight))

    def learn(
        self,
        graph: TokenGraph | None,
        tokens: Sequence[int],
        rows: int,
        forwards: Sequence[int],
        seconds: float,
        drafting: float,
    ) -> None:
        """Follow the costs, the rate, and what became of the candidates."""
        spent = self._costs.observe(rows, 1e3 * (seconds - drafting)) * self._costs(1)
        spent += self._drafted(forwards, self._costs.in_units(1e3 * drafting))
        expected = self._costs(rows) + sum(map(self._draft.costs, forwards))
        if self._credit.drafting:
            fade = 1 - 1 / STEPS
            self._earned, self._spent = fade * self._earned + len(tokens), fade * self._spent + expected
        self._credit.account(len(tokens), spent / self._costs(1))
        self._saving.step(self._costs.steps, self.tables)
        for behind, right in graph.follow(tokens) if graph else ():
            assert graph is not None
            for child in behind:
                self._calibration.record(graph.chances[child], child == right)
            self._seen += 1
            pace = max(PACE, 1 / (HASTE + self._seen))
            self._followed += pace * ((right is not None) - self._followed)

    def _drafted(self, forwards: Sequence[int], took: float | None) -> float:
        """Learn from the time that the draft model's forwards took together, where it is known; return it."""
        expected = sum(map(self._draft.costs, forwards))
        if not forwards or took is None:
            return expected
        for rows in forwards:
            self._draft.learn(rows, clipped(took / expected))
        return min(took, COLD * expected)
