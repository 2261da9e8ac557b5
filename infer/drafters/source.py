"""What drafts: a source fills a graph of candidates for each sequence of a batch.

candidates.py is the source of adaptive tokens and n-grams, draft_model.py that of a
smaller model. How much of a graph is verified is the planner's decision (planner.py).
"""

from collections.abc import Sequence
from typing import Protocol

from infer.engine.output import Request
from infer.engine.sampling import Sampling
from infer.loop import Verified
from infer.trees.token_graph import Drafts, TokenGraph
from infer.trees.tree import Tree


class DraftGraph:
    """The candidates that follow one sequence's text, in one step.

    The first `answered` places have answers of adaptive tokens. `fed` counts the rows of
    a draft model.
    """

    graph: TokenGraph
    answered: int = 0
    fed: int = 0

    def expand(self, node: int) -> None:
        """Add the children of a node, if this graph grows on demand."""

    def unanswered(self) -> "DraftGraph":
        """Return the candidates without the answers of adaptive tokens."""
        return self

    def tree(self, drafts: Drafts) -> Tree:
        """Return drafts of this graph as the tree to verify."""
        return Tree(tuple(drafts.tokens), tuple(drafts.parents), len(drafts.tokens))


class LevelPlanner(Protocol):
    """How deep a draft model drafts; a part of Planner."""

    def chance(self, weight: float) -> float:
        """Return how often a draft with this chance by the draft model is right."""

    def deepens(self, level: int, reach: float) -> bool:
        """Return True to draft a level that a text gets to with chance `reach`."""


class Source:
    """Fills the graphs of a batch.

    Of the answer of each adaptive token the `width` likeliest tokens are read.
    """

    width = 1

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Begin new texts; forget all others."""

    def begin(
        self, contexts: Sequence[Sequence[int]], depths: Sequence[int]
    ) -> Sequence[DraftGraph | None]:
        """Return a graph of each sequence, at most so deep; None for a plain step.

        `contexts` are the whole texts so far; the last tokens are the graphs' roots.
        """
        raise NotImplementedError

    def grow(self, planner: LevelPlanner) -> int:
        """Grow the graphs by forwards of a draft model. Return the number of forwards."""
        return 0

    def probes(self, b: int, count: int, length: int) -> tuple[int, ...]:
        """Return `count` adaptive tokens, or none, to hang under a node of sequence b.

        Its text has `length` tokens so far.
        """
        return ()

    def dry_run(self, b: int, context: Sequence[int]) -> DraftGraph | None:
        """Return a graph that takes no forward, for drafts that are not verified."""
        return None

    def keep(self, b: int, drafts: Drafts | None, result: Verified) -> None:
        """Keep from sequence b's result what drafts its next step."""

    def drop(self, b: int) -> None:
        """Forget a sequence; the last one takes its place."""
