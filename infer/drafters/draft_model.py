"""A smaller model drafts: its cache, and what of its rows is kept (GSD §3).

The draft model has a cache of its own, for all sequences side by side. What it was fed in a step waits
behind its committed rows; of these it keeps the accepted path's. Nothing is computed twice but
what stood elsewhere in the graph:

    text so far    ... y_{n-1} y_n        y_n: the root, not fed yet
    draft's rows   y_n | a  b | c  d      level by level, the nodes that have children
    verified       y_n a c z, then w      z was a leaf, or stood behind another node in the graph
    kept           y_n a c                next comes the chain z w, then its frontier

The graph grows level by level (`LevelDrafters`), in one forward of probes (`ProbeDrafters`), or by draws for
verification by ratio (`RatioDrafters`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from infer.drafters.adaptive import probe_ids
from infer.drafters.budget import Budget
from infer.engine.output import Candidates, ForwardOutput, LazyOutput, Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafters, Verified
from infer.models.draft import Draft
from infer.trees.growth import Growth, Rules
from infer.trees.lattice import lattice
from infer.trees.token_graph import Drafts, Outcome, TokenGraph, Watch
from infer.trees.tree import Tree

UNREAD = 32  # tokens of the text from which on they are read before the first level, not with it


@dataclass
class Pending:
    """One sequence between `propose` and `observe`: the draft model's rows and the graph behind them.

    The first rows are those of the text that it had not read; the last of these is the graph's root.
    """

    tokens: list[int]
    parents: list[int]
    graph: TokenGraph
    rows: dict[int, int]  # by node of the graph, of the nodes that were fed
    fed: int = 0
    drafts: Drafts | None = None
    drawn: dict[int, Tensor] | None = (
        None  # by node, where children are draws: what they were drawn from
    )

    def feed(self, nodes: Sequence[int]) -> range:
        """Queue these nodes for the next forward; their parents have rows, the root has one already."""
        for node in nodes:
            if node not in self.rows:
                self.rows[node] = len(self.tokens)
                self.tokens.append(self.graph.tokens[node])
                self.parents.append(self.rows[self.graph.parents[node]])
        return range(self.rows[nodes[0]], len(self.tokens))

    @property
    def tree(self) -> Tree:
        """All rows so far."""
        drawn = (
            None if self.drawn is None else dict[int, Tensor]()
        )  # the forward is asked for draws
        return Tree(
            tuple(self.tokens), tuple(self.parents), len(self.tokens), drawn=drawn
        )

    def kept(self, path: Sequence[int]) -> list[int]:
        """Return the rows of the text and of the accepted path, as far as they were fed, and fed behind it."""
        if not self.fed or self.drafts is None:  # nothing was drawn
            return []
        rows = list(range(self.rows[0] + 1))
        nodes = self.drafts.nodes
        for before, node in zip(path, path[1:]):
            grown = nodes[node]
            if self.graph.parents[grown] != nodes[before] or grown not in self.rows:
                break
            rows.append(self.rows[grown])
        return rows


class DraftModelDrafters(Drafters, ABC):
    """The drafters of a batch. `take` lends a runner for so many sequences, `give` takes it back at the end."""

    width = 1

    def __init__(
        self,
        draft: Draft,
        budget: Budget,
        *,
        depth: int,
        take: Callable[[int], Runner],
        give: Callable[[Runner], None],
        watch: Watch | None = None,
    ) -> None:
        self._draft = draft
        self._budget = budget
        self._depth = depth
        self._take = take
        self._give = give
        self._watch = watch
        self._runner: Runner | None = None
        self._requests: list[Request] = []
        self._sampling = GREEDY
        self._pending: list[Pending | None] = []
        self._keeping: list[list[int]] = []
        self._forwards: list[int] = []  # rows of each forward of the last drafting
        self._drafting = 0.0  # seconds of these
        self.max_rows = budget.max_rows

    @property
    def runner(self) -> Runner:
        """The draft model's, between `start` and the last `drop`."""
        assert self._runner is not None
        return self._runner

    @abstractmethod
    def _grow(self, pending: Sequence[Pending | None], depths: Sequence[int]) -> None:
        """Let each graph, which is a root, grow down to its depth."""

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See Drafters. A text that is longer than the draft model's context is not drafted for."""
        self._requests = list(requests)
        self._sampling = sampling
        self._pending = [None] * len(requests)
        self._keeping = [[] for _ in requests]
        self._runner = self._take(len(requests))
        self.runner.prefill(
            [[] for _ in requests]
        )  # what nothing is drafted for need not be read

    def propose(
        self, contexts: Sequence[Sequence[int]], left: Sequence[int]
    ) -> list[Tree]:
        """See Drafters."""
        self._commit()
        self._forwards = []
        depths = [
            min(n - 1, self._depth, self._draft.context - len(context))
            if self._budget.drafting
            else 0
            for context, n in zip(contexts, left)
        ]
        self._pending = [None] * len(contexts)
        for b, unread in enumerate(self._read(contexts, depths)):
            if unread:  # the last of these is the root
                parents = list(range(-1, len(unread) - 1))
                last = len(unread) - 1
                self._pending[b] = Pending(
                    unread, parents, TokenGraph([contexts[b][-1]]), {0: last}
                )
        began = self.runner.clock()
        if max(depths) > 0:
            self._grow(self._pending, depths)
        self._drafting = self.runner.agreed(self.runner.clock() - began)
        return [
            self._proposed(b, context[-1], left[b])
            for b, context in enumerate(contexts)
        ]

    def observe(self, b: int, result: Verified) -> None:
        """See Drafters."""
        pending = self._pending[b]
        self._budget.learn(
            pending.graph if pending else None, result, self._forwards, self._drafting
        )
        if pending:
            self._keeping[b] = pending.kept(result.path)
            if self._watch and pending.drafts:
                path = list(result.path)
                self._watch(
                    Outcome(
                        pending.graph,
                        pending.drafts,
                        path,
                        result.tokens,
                        rows=pending.fed,
                    )
                )

    def drop(self, b: int) -> None:
        """See Drafters."""
        self._commit()
        self.runner.drop(b)
        rows: Any
        for rows in (self._requests, self._pending, self._keeping):
            rows[b] = rows[-1]
            rows.pop()
        if not self._requests:
            self._give(self.runner)
            self._runner = None

    def _read(
        self, contexts: Sequence[Sequence[int]], depths: Sequence[int]
    ) -> list[list[int]]:
        """Return the tokens of each text that the draft model has not read; none where nothing is drafted."""

        def unread() -> list[list[int]]:
            return [
                self._draft.read(context[length:]) if depth > 0 else []
                for context, length, depth in zip(contexts, self.runner.lengths, depths)
            ]

        unread_tokens = unread()
        if max(map(len, unread_tokens)) <= UNREAD:
            return unread_tokens
        # A prompt, or what was emitted while drafting rested.
        self.runner.read([text[:-1] for text in unread_tokens])
        return unread()

    def _forward(
        self,
        pending: Sequence[Pending | None],
        probes: Sequence[Sequence[int]] | None = None,
    ) -> ForwardOutput:
        """Run one forward of all queued rows, and of probes under the last; without any the last row again."""
        trees = [item.tree if item else Tree.chain(0) for item in pending]
        for b, tokens in enumerate(probes or ()):
            if tokens:
                trees[b] = trees[b].probe([trees[b].drafted], tokens)
        fed = [min(item.fed, len(item.tokens) - 1) if item else 0 for item in pending]
        self._forwards.append(
            max(len(tree.tokens) - before for tree, before in zip(trees, fed))
        )
        output = self.runner.forward(trees, self._requests, self._sampling, fed)
        for item in pending:
            if item:
                item.fed = len(item.tokens)
        return output

    def _proposed(self, b: int, root: int, left: int) -> Tree:
        pending = self._pending[b]
        if pending is None:
            return Tree.chain(root)
        drafts = pending.drafts = self._budget.verified(pending.graph, depth=left - 1)
        shared = drafts.shared(pending.graph)
        return Tree(
            tuple(drafts.tokens),
            tuple(drafts.parents),
            len(drafts.tokens),
            shared=shared,
        )

    def _commit(self) -> None:
        if any(self._keeping):
            self.runner.commit(self._keeping)
            self._keeping = [[] for _ in self._keeping]


class LevelDrafters(DraftModelDrafters):
    """SSD, TSD and GSD: a sequence, a tree or a graph is drawn level by level (GSD §3-§5), each by one forward
    of the new frontier. `most` bounds the draft model's rows for a sequence and step, but for the text's own
    tokens.
    """

    draws = False  # see Growth

    def __init__(
        self, draft: Draft, rules: Rules, budget: Budget, *, most: int, **lend: Any
    ) -> None:
        super().__init__(draft, budget, depth=rules.depth, **lend)
        self._rules = rules
        self._most = most

    def _grow(self, pending: Sequence[Pending | None], depths: Sequence[int]) -> None:
        growths: dict[int, Growth] = {}
        for b, item in enumerate(pending):
            if item:
                growths[b] = Growth(
                    item.graph.tokens[0],
                    self._rules,
                    most=self._most,
                    draws=self.draws,
                    calibrated=self._budget.chance,
                )
                item.graph = growths[b].graph
        for level in range(max(depths)):
            growths = {
                b: growth
                for b, growth in growths.items()
                if level < depths[b] and growth.frontier
            }
            if not growths:
                break
            # Of all sequences together: a forward of one's frontier is one of all.
            reach = sum(growth.reach for growth in growths.values()) / len(pending)
            if not self._budget.deepens(
                level, reach, max(len(growth.frontier) for growth in growths.values())
            ):
                break
            rows = {
                b: pending[b].feed(growth.frontier)  # type: ignore[union-attr]
                for b, growth in growths.items()
            }
            output = self._forward(pending)
            for b, growth in growths.items():
                candidates = self._behind(b, growth.frontier, rows[b], output)
                growth.grow(candidates.ids, candidates.weights)

    def _behind(
        self, b: int, nodes: Sequence[int], rows: range, output: ForwardOutput
    ) -> Candidates:
        return output.next_candidates(b, rows, self._rules.k)


class ProbeDrafters(DraftModelDrafters):
    """A draft model with adaptive tokens draws its whole graph in one forward (SDSAT's probes; PARD, 2025): `k`
    candidates for the next place and, by a probe each, for all of `depth` places are a lattice.
    """

    def __init__(
        self, draft: Draft, budget: Budget, *, k: int, depth: int, **lend: Any
    ) -> None:
        """Raise ValueError for more places than the draft model has diverse tokens for."""
        super().__init__(draft, budget, depth=depth, **lend)
        assert draft.adaptive is not None
        self._k = k
        self._probes = probe_ids(draft.adaptive.ids, depth - 1) if depth > 1 else ()

    def _grow(self, pending: Sequence[Pending | None], depths: Sequence[int]) -> None:
        output = self._forward(
            pending, [self._probes[: max(0, depth - 1)] for depth in depths]
        )
        for b, item in enumerate(pending):
            if item is None:
                continue
            root = len(item.tokens) - 1
            candidates = [output.next_candidates(b, [root], self._k)]
            if depths[b] > 1:
                candidates.append(
                    output.next_candidates(
                        b, range(root + 1, root + depths[b]), self._k
                    )
                )
            ids = [row for part in candidates for row in part.ids]
            chances = [row for part in candidates for row in part.weights]
            item.graph = lattice(item.graph.tokens[0], ids, chances)


class RatioDrafters(LevelDrafters):
    """SSD, TSD and GSD for verification by ratio: the candidates are draws without replacement (GSD §3).

    Each sequence has a generator of its own, which begins with its request's seed: runs repeat, whatever stands
    beside them. A merged node's children were drawn behind the node that it was merged into. The budget must
    verify whole families (see pick.py).
    """

    draws = True

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See Drafters."""
        super().start(requests, sampling)
        device = self._draft.lm.device
        self._generators = [
            torch.Generator(device).manual_seed(request.seed) for request in requests
        ]

    def drop(self, b: int) -> None:
        """See Drafters."""
        super().drop(b)
        self._generators[b] = self._generators[-1]
        self._generators.pop()

    def _grow(self, pending: Sequence[Pending | None], depths: Sequence[int]) -> None:
        for item in pending:
            if item:
                item.drawn = {}
        super()._grow(pending, depths)

    def _behind(
        self, b: int, nodes: Sequence[int], rows: range, output: ForwardOutput
    ) -> Candidates:
        assert isinstance(output, LazyOutput)  # draws are made on the host
        candidates, q_nV = output.draws(b, rows, self._rules.k, self._generators[b])
        self._pending[b].drawn.update(zip(nodes, q_nV))  # type: ignore[union-attr]
        return candidates

    def _proposed(self, b: int, root: int, left: int) -> Tree:
        tree = super()._proposed(b, root, left)
        pending = self._pending[b]
        if pending is None or pending.drafts is None:
            return tree
        nodes = pending.drafts.nodes
        graph = pending.graph
        drawn = pending.drawn or {}
        parents = sorted(set(tree.parents[1:]))
        return replace(
            tree,
            drawn={at: drawn[graph.merged.get(nodes[at], nodes[at])] for at in parents},
        )
