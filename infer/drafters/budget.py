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

from infer.drafters.auto import STEPS, Calibration, Credit, Saving
from infer.drafters.costs import COLD, CostCurve, Costs, LoopCosts, clipped
from infer.loop import Verified
from infer.trees.token_graph import Drafts, TokenGraph, unroll, unroll_levels

PACE = 0.05  # of what is followed as it goes: the last twenty steps or so count
# at first, since who drafts one level only never sees what more are worth
HOPED = 0.8
HASTE = 5


@dataclass(frozen=True)
class FixedBudget:
    """Every level, and the likeliest `nodes` of the graph's tree (GSD §5.4).

    A budget serves all sequences of a batch; `drafting` says whether anything is drafted now.
    """

    nodes: int
    drafting = True

    @property
    def max_rows(self) -> int:
        """Nodes of the largest verified tree, with the root."""
        return 1 + self.nodes

    def chance(self, weight: float) -> float:
        """Return how often drafts are right that have such a chance by the draft model."""
        return weight

    def deepens(self, level: int, reach: float, rows: int) -> bool:
        """Return whether a level of `rows` is drafted; a text goes on through it with chance `reach`."""
        return True

    def verified(self, graph: TokenGraph, *, depth: int) -> Drafts:
        """Return the part of a graph that is verified, down to a depth: the likeliest nodes first."""
        return unroll(graph, [0.0] * self.nodes, depth=depth)

    def learn(
        self,
        graph: TokenGraph | None,
        result: Verified,
        forwards: Sequence[int],
        drafting: float,
    ) -> None:
        """Learn from a step: its graph, the rows of the draft model's forwards, and their seconds in all."""


class FamilyBudget(FixedBudget):
    """The same number of nodes for verification by ratio: level by level, siblings together."""

    def verified(self, graph: TokenGraph, *, depth: int) -> Drafts:
        """See FixedBudget. The likeliest nodes of each level get their children."""
        return unroll_levels(graph, self.nodes, depth=depth)


class AutoBudget:
    """By measurement; goes on learning from one text to the next. Both tables have one unit of time."""

    def __init__(
        self, target: Costs, draft: Costs, *, save: Callable[..., None] | None = None
    ) -> None:
        """Give both tables to `save` from time to time."""
        self.max_rows = target.rows[-1]
        self._costs = LoopCosts(target, self.max_rows)
        self._draft = CostCurve(draft)
        self._calibration = Calibration()
        self._credit = Credit()
        self._saving = Saving(save)
        # recent tokens and time
        self._earned = 1.0
        self._spent = target(1)
        # how often the text went on through one of a node's children
        self._followed = HOPED
        self._seen = 0

    @property
    def tables(self) -> list[Costs]:
        """What was learned of the target's and the draft model's L(q)."""
        return [self._costs.costs, self._draft.costs]

    @property
    def drafting(self) -> bool:
        """While there is credit, but for plain steps that are due."""
        return self._credit.drafting and not self._costs.due

    @property
    def _rate(self) -> float:
        return max(self._earned / self._spent, 1 / self._costs(1))

    def chance(self, weight: float) -> float:
        """Return the recent share of right ones."""
        return self._calibration.chance(weight)

    def deepens(self, level: int, reach: float, rows: int) -> bool:
        """See FixedBudget. The first level is always drafted: the credit pays for it."""
        return level == 0 or reach * self._followed > self._rate * self._draft.costs(
            rows
        )

    def verified(self, graph: TokenGraph, *, depth: int) -> Drafts:
        """Return every node that is worth its row."""
        rate = self._rate
        prices = [rate * slope for slope in self._costs.slopes[1:]]
        return unroll(
            graph, prices, depth=depth, calibrated=lambda weight, _: self.chance(weight)
        )

    def learn(
        self,
        graph: TokenGraph | None,
        result: Verified,
        forwards: Sequence[int],
        drafting: float,
    ) -> None:
        """Follow the costs, the rate, and what became of the candidates."""
        tokens = result.tokens
        spent = self._costs.observe(
            result.rows, 1e3 * (result.seconds - drafting)
        ) * self._costs(1)
        spent += self._drafted(forwards, self._costs.in_units(1e3 * drafting))
        expected = self._costs(result.rows) + sum(map(self._draft.costs, forwards))
        if self._credit.drafting:
            fade = 1 - 1 / STEPS
            self._earned = fade * self._earned + len(tokens)
            self._spent = fade * self._spent + expected
        self._credit.account(len(tokens), spent / self._costs(1))
        self._saving.step(self._costs.steps, self.tables)
        if graph is None:
            return
        for behind, right in graph.follow(tokens):
            for child in behind:
                self._calibration.record(graph.chances[child], child == right)
            self._seen += 1
            pace = max(PACE, 1 / (HASTE + self._seen))
            self._followed += pace * ((right is not None) - self._followed)

    def _drafted(self, forwards: Sequence[int], took: float | None) -> float:
        expected = sum(map(self._draft.costs, forwards))
        if not forwards or took is None:
            return expected
        for rows in forwards:
            self._draft.learn(rows, clipped(took / expected))
        return min(took, COLD * expected)


Budget = FixedBudget | AutoBudget
