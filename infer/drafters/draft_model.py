"""Draft with a smaller model, and keep the cache rows of accepted drafts (GSD §3).

The draft model has its own cache, shared by all sequences of the batch. The rows of a step
follow the committed rows; after verification the rows of the accepted path are committed.
Only tokens that had another parent in the graph, or no row, are computed again:

    text so far    ... y_{n-1} y_n        y_n: the root, not fed yet
    draft's rows   y_n | a  b | c  d      level by level, the nodes that have children
    verified       y_n a c z, then w      z was a leaf, or had another parent
    kept           y_n a c                the next step feeds z w, then its frontier

The graph grows level by level, by the likeliest tokens (`LevelSource`) or by draws for
verification by ratio (`RatioSource`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conf.errors import UserError
from infer.config import DecodeConfig
from infer.drafters.source import DraftGraph, LevelPlanner, Source
from infer.engine.output import Candidates, ForwardOutput, LazyOutput, Request
from infer.engine.runner import Runner, Runners
from infer.engine.sampling import GREEDY, Sampling
from infer.engine.static import WIDTH
from infer.loop import Verified
from infer.models.draft import Draft
from infer.trees.growth import Growth, Rules
from infer.trees.token_graph import Drafts, TokenGraph
from infer.trees.tree import Tree

#: A text with more unread tokens is read before the first level, not in the same forward.
MAX_UNREAD = 32
#: Graph rows in a step. With the text's rows they are a power of two, as fixed shapes are.
ROWS = 1024 - MAX_UNREAD


@dataclass
class Pending(DraftGraph):
    """One sequence between `begin` and `keep`: the draft model's rows and a graph.

    `tokens` and `parents` have one entry per row. The first rows are the text's unread
    tokens; the last of them is the graph's root. `rows` maps a node of the graph to its
    row. The first `fed` rows were fed. `drawn` maps a node to the distribution that its
    children were drawn from, None without draws.
    """

    tokens: list[int]
    parents: list[int]
    graph: TokenGraph
    rows: dict[int, int]
    fed: int = 0
    drawn: dict[int, Tensor] | None = None

    @classmethod
    def after(cls, unread: list[int], root: int) -> "Pending":
        """Return a graph without drafts after a text's unread tokens."""
        last = len(unread) - 1
        return cls(unread, list(range(-1, last)), TokenGraph([root]), {0: last})

    def feed(self, nodes: Sequence[int]) -> range:
        """Queue nodes for the next forward and return the range of their rows.

        The root has a row from the start; the parent of every other node must have one.
        """
        for node in nodes:
            if node not in self.rows:
                self.rows[node] = len(self.tokens)
                self.tokens.append(self.graph.tokens[node])
                self.parents.append(self.rows[self.graph.parents[node]])
        return range(self.rows[nodes[0]], len(self.tokens))

    @property
    def queued(self) -> Tree:
        """Return all rows so far, for a forward of the draft model."""
        # An empty mapping makes the forward return distributions to draw from.
        drawn: Mapping[int, Tensor] | None = None if self.drawn is None else {}
        size = len(self.tokens)
        return Tree(tuple(self.tokens), tuple(self.parents), size, drawn=drawn)

    def tree(self, drafts: Drafts) -> Tree:
        """See DraftGraph. Includes the nodes after merged ones and any draws."""
        tree = replace(super().tree(drafts), shared=drafts.shared(self.graph))
        if self.drawn is None:
            return tree
        merged = self.graph.merged
        parents = {at: drafts.nodes[at] for at in sorted(set(tree.parents[1:]))}
        drawn = {at: self.drawn[merged.get(node, node)] for at, node in parents.items()}
        return replace(tree, drawn=drawn)

    def kept(self, drafts: Drafts, path: Sequence[int]) -> list[int]:
        """Return the rows of the text and the fed part of the accepted path."""
        if not self.fed:
            return []
        rows = list(range(self.rows[0] + 1))
        nodes = drafts.nodes
        for before, node in zip(path, path[1:]):
            grown = nodes[node]
            if self.graph.parents[grown] != nodes[before] or grown not in self.rows:
                break
            rows.append(self.rows[grown])
        return rows


@dataclass
class Drafting:
    """The state of one sequence: its request, the pending draft, and rows to commit."""

    request: Request
    pending: Pending | None = None
    kept: list[int] = field(default_factory=list)
    generator: torch.Generator | None = None


@dataclass(frozen=True)
class DraftSetup:
    """A draft model and its runners for texts of up to `capacity` tokens.

    Up to `max_rows` rows of graphs are fed for one sequence and step.
    """

    draft: Draft
    runners: Runners
    capacity: int
    max_rows: int


class LevelSource(Source):
    """SSD, TSD and GSD: grow a chain, a tree or a graph level by level (GSD §3-§5).

    Each level takes one forward of the new frontier. A runner is held from `start` to the last
    `drop`.
    """

    draws = False  # see Growth

    def __init__(self, setup: DraftSetup, rules: Rules) -> None:
        self._setup = setup
        self._draft = setup.draft
        self._rules = rules
        self._runner: Runner | None = None
        self._sequences: list[Drafting] = []
        self._sampling = GREEDY
        self._depths: list[int] = []  # of this step
        self._forwards = 0

    @property
    def runner(self) -> Runner:
        """Return the draft model's runner."""
        assert self._runner is not None
        return self._runner

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See Source. Texts longer than the draft model's context get no drafts."""
        self._sequences = [Drafting(request) for request in requests]
        self._sampling = sampling
        self._runner = self._setup.runners.take(
            batch=len(requests),
            capacity=self._setup.capacity,
            max_rows=MAX_UNREAD + self._setup.max_rows,
        )
        # Prompts are read before their first draft.
        self.runner.prefill([[] for _ in requests])

    def begin(
        self, contexts: Sequence[Sequence[int]], depths: Sequence[int]
    ) -> list[Pending | None]:
        """See Source."""
        self._commit()
        self._depths = [
            max(0, min(depth, self._rules.depth, self._draft.context - len(context)))
            for depth, context in zip(depths, contexts)
        ]
        unread = self._read(contexts)
        for sequence, tokens, context in zip(self._sequences, unread, contexts):
            sequence.pending = Pending.after(tokens, context[-1]) if tokens else None
        return [sequence.pending for sequence in self._sequences]

    def grow(self, planner: LevelPlanner) -> int:
        """See Source."""
        self._forwards = 0
        if any(self._depths):
            self._grow(planner)
        return self._forwards

    def keep(self, b: int, drafts: Drafts | None, result: Verified) -> None:
        """See Source: the rows of the accepted path."""
        sequence = self._sequences[b]
        if sequence.pending and drafts:
            sequence.kept = sequence.pending.kept(drafts, result.path)

    def drop(self, b: int) -> None:
        """See Source."""
        self._commit()
        self.runner.drop(b)
        self._sequences[b] = self._sequences[-1]
        self._sequences.pop()
        if not self._sequences:
            self._setup.runners.give(self.runner)
            self._runner = None

    def _grow(self, planner: LevelPlanner) -> None:
        """Grow the pending graphs from their roots down to this step's depths."""
        depths = self._depths
        growing: dict[int, tuple[Pending, Growth]] = {}
        for b, sequence in enumerate(self._sequences):
            if pending := sequence.pending:
                growth = Growth(
                    pending.graph.tokens[0],
                    self._rules,
                    most=self._setup.max_rows,
                    draws=self.draws,
                    calibrated=planner.chance,
                )
                growing[b] = (pending, growth)
                pending.graph = growth.graph
        for level in range(max(depths)):
            growing = {
                b: (pending, growth)
                for b, (pending, growth) in growing.items()
                if level < depths[b] and growth.frontier
            }
            # Averaged over all sequences: a forward for one is a forward for all.
            reach = sum(growth.reach for _, growth in growing.values()) / len(depths)
            if not growing or not planner.deepens(level, reach):
                break
            rows = {
                b: pending.feed(growth.frontier)
                for b, (pending, growth) in growing.items()
            }
            output = self._forward()
            for b, (_, growth) in growing.items():
                candidates = self._candidates(b, growth.frontier, rows[b], output)
                growth.grow(candidates.ids, candidates.weights)

    def _candidates(
        self, b: int, nodes: Sequence[int], rows: range, output: ForwardOutput
    ) -> Candidates:
        return output.next_candidates(b, rows, self._rules.k)

    def _read(self, contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return each text's unread tokens, at most `MAX_UNREAD`; empty lists at depth 0."""
        depths = self._depths

        def unread() -> list[list[int]]:
            return [
                self._draft.read(context[length:]) if depth else []
                for context, length, depth in zip(contexts, self.runner.lengths, depths)
            ]

        tokens = unread()
        if max(map(len, tokens)) <= MAX_UNREAD:
            return tokens
        # A prompt, or the tokens of steps without drafts.
        self.runner.read([text[:-1] for text in tokens])
        return unread()

    def _forward(self) -> ForwardOutput:
        """Run one forward of all queued rows.

        A sequence without queued rows feeds its last row again.
        """
        pending = [sequence.pending for sequence in self._sequences]
        trees = [item.queued if item else Tree.chain(0) for item in pending]
        fed = [min(item.fed, len(item.tokens) - 1) if item else 0 for item in pending]
        requests = [sequence.request for sequence in self._sequences]
        self._forwards += 1
        output = self.runner.forward(trees, requests, self._sampling, fed)
        for item in pending:
            if item:
                item.fed = len(item.tokens)
        return output

    def _commit(self) -> None:
        if any(sequence.kept for sequence in self._sequences):
            self.runner.commit([sequence.kept for sequence in self._sequences])
            for sequence in self._sequences:
                sequence.kept = []


class RatioSource(LevelSource):
    """SSD, TSD and GSD by ratio: candidates are draws without replacement (GSD §3).

    Each sequence has its own generator, seeded by its request, so that its drafts do not
    depend on the other sequences of the batch. A merged node shares the children of the
    node that it was merged into. The planner must verify whole families (see pick.py).
    """

    draws = True

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See Source."""
        super().start(requests, sampling)
        device = self._draft.lm.device
        for sequence in self._sequences:
            generator = torch.Generator(device)
            sequence.generator = generator.manual_seed(sequence.request.seed)

    def _grow(self, planner: LevelPlanner) -> None:
        for sequence in self._sequences:
            if sequence.pending:
                sequence.pending.drawn = {}
        super()._grow(planner)

    def _candidates(
        self, b: int, nodes: Sequence[int], rows: range, output: ForwardOutput
    ) -> Candidates:
        assert isinstance(output, LazyOutput)  # draws are made on the host
        sequence = self._sequences[b]
        assert sequence.pending and sequence.generator
        assert sequence.pending.drawn is not None
        candidates, q_nV = output.draws(b, rows, self._rules.k, sequence.generator)
        sequence.pending.drawn.update(zip(nodes, q_nV))
        return candidates


class DraftModelSources:
    """Make sources for a target's draft model, by the settings of each text."""

    def __init__(
        self, target: PreTrainedModel, draft: Draft, *, compile: bool = False
    ) -> None:
        self._draft = draft
        self._runners = Runners(draft.lm, compile=compile, target=target)
        # A small model's step time grows with its layers (kernel launches), a large
        # model's with its weights (memory bandwidth).
        layers = [
            lm.config.get_text_config().num_hidden_layers for lm in (draft.lm, target)
        ]
        weights = draft.lm.num_parameters() / target.num_parameters()
        self.forward = min(1.0, max(weights, layers[0] / layers[1]))

    def source(self, decode: DecodeConfig, *, capacity: int) -> LevelSource:
        """Return the source for the settings. Raise UserError where they do not fit."""
        rules = decode.rules
        if rules.k > WIDTH:
            raise UserError(
                f"decode.children must be at most {WIDTH}, got {rules.k}. Lower it."
            )
        setup = DraftSetup(self._draft, self._runners, capacity, ROWS)
        kind = RatioSource if decode.verify == "ratio" else LevelSource
        return kind(setup, rules)
