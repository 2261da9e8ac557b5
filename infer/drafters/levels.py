"""SSD, TSD and GSD: the draft model draws a sequence, a tree or a graph, level by level (GSD §3-§5).

Each level is one forward, in which only the new frontier's tokens are rows. growth.py says what
grows.
"""

from collections.abc import Callable, Collection, Sequence

from infer.drafters.budget import Budget
from infer.drafters.draft_model import DraftModelDrafters, Pending
from infer.drafters.outcome import Watch
from infer.engine.reading import Candidates, Reading
from infer.engine.runner import Runner
from infer.models.draft import Draft
from infer.trees.growth import Growth, Rules


class LevelDrafters(DraftModelDrafters):
    """`most` bounds the draft model's rows for a sequence and step, but for the text's own tokens."""

    within_level = False  # see Growth

    def __init__(
        self,
        draft: Draft,
        rules: Rules,
        budget: Budget,
        *,
        most: int,
        take: Callable[[int], Runner],
        give: Callable[[Runner], None],
        watch: Watch | None = None,
    ) -> None:
        super().__init__(draft, budget, depth=rules.depth, take=take, give=give, watch=watch)
        self._rules, self._most = rules, most

    def _grow(self, pending: Sequence[Pending | None], depths: Sequence[int]) -> None:
        growths = dict[int, Growth]()
        for b, one in enumerate(pending):
            if one:
                growths[b] = self._growth(one.graph.tokens[0])
                one.graph = growths[b].graph
        for level in range(max(depths)):
            growths = {b: growth for b, growth in growths.items() if level < depths[b] and growth.frontier}
            if not growths or not self._deepens(level, growths.values(), len(pending)):
                break
            rows = {b: pending[b].feed(growth.frontier) for b, growth in growths.items()}  # type: ignore[union-attr]
            reading = self._forward(pending)
            for b, growth in growths.items():
                found = self._behind(b, growth.frontier, rows[b], reading)
                growth.grow(found.ids, found.weights)

    def _growth(self, root: int) -> Growth:
        return Growth(
            root,
            self._rules,
            most=self._most,
            within_level=self.within_level,
            calibrated=self._budget.chance,
        )

    def _behind(self, b: int, nodes: Sequence[int], rows: range, reading: Reading) -> Candidates:
        """The candidates behind these nodes of graph b, which are these rows of it."""
        return reading.following(b, rows, self._rules.k)

    def _deepens(self, level: int, growths: Collection[Growth], sequences: int) -> bool:
        """For all sequences together: a forward of one's frontier is one of all."""
        reach = sum(growth.reach for growth in growths) / sequences
        return self._budget.deepens(level, reach, max(len(growth.frontier) for growth in growths))
