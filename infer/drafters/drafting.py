"""Draft for a batch: a source fills graphs, a planner chooses the nodes to verify.

SourceDrafters serves every method that drafts. With probes under nodes of the tree, the
next draft's answers come from the forward that verifies this one (SDSAT §2.1): k adaptive
tokens under y_n predict the tokens n+2 .. n+k+1, while the model itself predicts y_{n+1}.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from infer.drafters.costs import StepTime
from infer.drafters.planner import Planner
from infer.drafters.source import DraftGraph, Source
from infer.engine.output import Request
from infer.engine.sampling import Sampling
from infer.loop import Drafters, Verified
from infer.trees.token_graph import Drafts, Outcome, Watch
from infer.trees.tree import Tree


class Stopwatch:
    """Time the steps of one batch, from the proposal to the first result.

    The time of observing results counts towards the next step. `agree` returns rank 0's
    value on each rank of a model that is split over ranks: ranks that decide differently
    would wait for each other.
    """

    def __init__(self, agree: Callable[[float], float] = float) -> None:
        self.agree = agree
        self.reset()

    def reset(self) -> None:
        """Discard the measured time of a step that had no result."""
        self.running = False  # True from a step's start to its first result
        self._began = 0.0
        self._observing = 0.0
        self._seconds = 0.0

    def start(self) -> None:
        """Start a step."""
        self.running = True
        self._began = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Return the seconds since the start of the step, by this rank's clock."""
        return time.perf_counter() - self._began

    @contextmanager
    def observing(self) -> Iterator[float]:
        """Yield the seconds of the step. Count the context's own time to the next step."""
        began = time.perf_counter()
        if self.running:
            self.running = False
            self._seconds = self.agree(began - self._began + self._observing)
            self._observing = 0.0
        yield self._seconds
        self._observing += time.perf_counter() - began


@dataclass(slots=True)
class Proposal:
    """A sequence's graph in one step, and the drafts to verify."""

    graph: DraftGraph
    drafts: Drafts


@dataclass(slots=True)
class DryRun:
    """Drafts that are not verified, and the length of the text when they were made."""

    graph: DraftGraph
    drafts: Drafts
    start: int


class SourceDrafters(Drafters):
    """Draft for a batch from a source, as much as a planner decides.

    A planner that measures learns from the `stopwatch`. Batches may share a planner.
    """

    def __init__(
        self,
        source: Source,
        planner: Planner,
        *,
        stopwatch: Stopwatch | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.max_rows = planner.max_rows
        self.width = source.width
        self._source = source
        self._planner = planner
        self._stopwatch = stopwatch or Stopwatch()
        self._watch = watch
        self._proposals: list[Proposal | None] = []
        self._dry_runs: list[DryRun | None] = []
        # Of this step: the draft model's forwards and their seconds; the end of `propose`.
        self._forwards = 0
        self._drafting = 0.0
        self._proposed = 0.0

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See Drafters."""
        self._source.start(requests, sampling)
        self._stopwatch.reset()
        self._proposals = [None] * len(requests)
        self._dry_runs = [None] * len(requests)

    def propose(
        self, contexts: Sequence[Sequence[int]], left: Sequence[int]
    ) -> list[Tree]:
        """See Drafters."""
        self._stopwatch.start()
        drafting = self._planner.drafting
        graphs = self._source.begin(contexts, [n - 1 if drafting else 0 for n in left])
        self._grow()
        trees = []
        for b, (graph, context, n) in enumerate(zip(graphs, contexts, left)):
            self._proposals[b] = None
            if drafting:
                self._dry_runs[b] = None
            else:
                self._dry_run(b, context, n)
            trees.append(
                self._plan(b, graph, n, len(context))
                if graph
                else Tree.chain(context[-1])
            )
        self._proposed = self._stopwatch.elapsed
        return trees

    def observe(self, b: int, result: Verified) -> None:
        """See Drafters."""
        verifying = self._stopwatch.elapsed - self._proposed
        proposal = self._proposals[b]
        first = self._stopwatch.running
        with self._stopwatch.observing() as seconds:
            time = StepTime(seconds, self._forwards, self._drafting, first)
            self._planner.learn(proposal.graph if proposal else None, result, time)
        self._source.keep(b, proposal.drafts if proposal else None, result)
        self._report(b, list(result.path), result.tokens, verifying)

    def drop(self, b: int) -> None:
        """See Drafters."""
        self._report(b, [0], [], 0.0)  # the last step was not observed
        self._source.drop(b)
        self._proposals[b] = self._proposals[-1]
        self._proposals.pop()
        self._dry_runs[b] = self._dry_runs[-1]
        self._dry_runs.pop()

    def _grow(self) -> None:
        """Let a draft model grow the graphs and time its forwards."""
        began = self._stopwatch.elapsed
        self._forwards = self._source.grow(self._planner)
        self._drafting = 0.0
        if self._forwards:
            self._drafting = self._stopwatch.agree(self._stopwatch.elapsed - began)

    def _plan(self, b: int, graph: DraftGraph, left: int, length: int) -> Tree:
        """Return the tree to verify, with probes under the nodes that the planner chose.

        The text has `length` tokens so far; at most `left` more may follow.
        """
        drafts, sites, k = self._planner.plan(graph, left)
        self._proposals[b] = Proposal(graph, drafts)
        tree = graph.tree(drafts)
        # No row may be deeper than the last token that can be fed: positions are limited.
        probes = self._source.probes(b, max(0, min(k, left - 2)), length)
        sites = [node for node in sites if drafts.depths[node] + len(probes) < left]
        return tree.probe(sites, probes) if probes and sites else tree

    def _dry_run(self, b: int, context: Sequence[int], left: int) -> None:
        """Compare the last unverified draft with the text since then, and make a new one."""
        if run := self._dry_runs[b]:
            tokens = context[run.start :]
            if not self._planner.learn_dry_run(run.graph, run.drafts, tokens):
                return
        graph = self._source.dry_run(b, context)
        drafts = self._planner.dry_run(graph, left) if graph else None
        self._dry_runs[b] = (
            DryRun(graph, drafts, len(context)) if graph and drafts else None
        )

    def _report(
        self, b: int, path: list[int], tokens: list[int], verifying: float
    ) -> None:
        """Pass a proposal and its result to the `watch`."""
        proposal = self._proposals[b]
        if self._watch and proposal:
            outcome = Outcome(
                proposal.graph.graph,
                proposal.drafts,
                path,
                tokens,
                rows=proposal.graph.fed,
                draft_seconds=self._drafting,
                verification_seconds=verifying,
            )
            self._watch(outcome)
