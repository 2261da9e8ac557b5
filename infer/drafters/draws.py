"""SSD, TSD and GSD for verification by ratio: the candidates are draws from the draft model (GSD §3).

Behind each node of the frontier k tokens are drawn without replacement, by a generator of each
sequence's own, which begins with its request's seed: runs repeat, whatever stands beside them. A merged
node's children were drawn from the distribution behind the node that it was merged into.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from infer.drafters.draft_model import Pending
from infer.drafters.levels import LevelDrafters
from infer.engine.reading import Candidates, Reading, Request
from infer.engine.sampling import Sampling
from infer.trees.tree import Tree


class RatioDrafters(LevelDrafters):
    """Wants a budget of whole families (see ratio.py)."""

    within_level = True

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See Drafters."""
        super().start(requests, sampling)
        device = self._draft.lm.device
        self._generators = [torch.Generator(device).manual_seed(request.seed) for request in requests]

    def drop(self, b: int) -> None:
        """See Drafters."""
        super().drop(b)
        self._generators[b] = self._generators[-1]
        self._generators.pop()

    def _grow(self, pending: Sequence[Pending | None], depths: Sequence[int]) -> None:
        for one in pending:
            if one:
                one.drawn = {}
        super()._grow(pending, depths)

    def _behind(self, b: int, nodes: Sequence[int], rows: range, reading: Reading) -> Candidates:
        found, q_nV = reading.draws(b, rows, self._rules.k, self._generators[b])
        self._pending[b].drawn.update(zip(nodes, q_nV))  # type: ignore[union-attr]
        return found

    def _proposed(self, b: int, root: int, left: int) -> Tree:
        tree, pending = super()._proposed(b, root, left), self._pending[b]
        if pending is None or pending.drafts is None:
            return tree
        nodes, graph, drawn = pending.drafts.nodes, pending.graph, pending.drawn or {}
        parents = sorted(set(tree.parents[1:]))
        return replace(tree, drawn={at: drawn[graph.merged.get(nodes[at], nodes[at])] for at in parents})
