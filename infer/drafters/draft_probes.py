"""A draft model with adaptive tokens draws its whole graph in one forward (SDSAT's probes; PARD, 2025).

Behind the last token it is asked for the next place as ever, and by a probe for each further
one. The candidates for these places, predicted without regard to one another, are a lattice.
"""

from collections.abc import Callable, Sequence

from infer.drafters.adaptive import probe_ids
from infer.drafters.budget import Budget
from infer.drafters.draft_model import DraftModelDrafters, Pending
from infer.drafters.outcome import Watch
from infer.engine.runner import Runner
from infer.models.draft import Draft
from infer.trees.lattice import lattice


class ProbeDrafters(DraftModelDrafters):
    """`k` candidates for each of `depth` places."""

    def __init__(
        self,
        draft: Draft,
        budget: Budget,
        *,
        k: int,
        depth: int,
        take: Callable[[int], Runner],
        give: Callable[[Runner], None],
        watch: Watch | None = None,
    ) -> None:
        """Raises ValueError for more places than the draft model has diverse tokens for."""
        super().__init__(draft, budget, depth=depth, take=take, give=give, watch=watch)
        assert draft.adaptive is not None
        self._k = k
        self._probes = probe_ids(draft.adaptive.ids, depth - 1) if depth > 1 else ()

    def _grow(self, pending: Sequence[Pending | None], depths: Sequence[int]) -> None:
        reading = self._forward(pending, [self._probes[: max(0, depth - 1)] for depth in depths])
        for b, one in enumerate(pending):
            if one is None:
                continue
            root = len(one.tokens) - 1
            found = [reading.following(b, [root], self._k)]
            if depths[b] > 1:
                found.append(reading.following(b, range(root + 1, root + depths[b]), self._k))
            ids = [row for part in found for row in part.ids]
            one.graph = lattice(one.graph.tokens[0], ids, [row for part in found for row in part.weights])
