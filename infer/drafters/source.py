"""A source of drafts fills a graph of candidates for each sequence of a batch.

candidates.py drafts from adaptive tokens and n-grams, draft_model.py from a smaller model.
The planner (planner.py) decides how much of a graph is verified.
"""

from collections.abc import Sequence
from typing import Protocol

from infer.engine.output import Request
from infer.engine.sampling import Sampling
from infer.loop import Verified
from infer.trees.token_graph import Drafts, TokenGraph
from infer.trees.tree import Tree

#: The number of kinds of candidates that planners calibrate separately.
KINDS = 5


class DraftGraph:
    """The candidates that follow one sequence's text in one step.

    The first `answered` places have answers of adaptive tokens. `fed` counts the rows that
    a draft model was fed.
    """

    graph: TokenGraph
    answered: int = 0
    fed: int = 0

    def kind(self, node: int) -> int:
        """Return the kind of a node, below KINDS. By kind planners learn how often nodes are right."""
        return 0

    def expand(self, node: int) -> None:
        """Add the children of a node, if this graph grows on demand."""

    def answering(self, count: int) -> "DraftGraph":
        """Return the same graph with only the first answers of adaptive tokens."""
        return self

    def tree(self, drafts: Drafts) -> Tree:
        """Return drafts of this graph as the tree to verify."""
        return Tree(tuple(drafts.tokens), tuple(drafts.parents), len(drafts.tokens))


class LevelPlanner(Protocol):
    """The part of Planner that decides how deep a draft model drafts."""

    def chance(self, weight: float) -> float:
        """Return how often drafts are right that the draft model gives probability `weight`."""

    def deepens(self, level: int, reach: float) -> bool:
        """Return True to draft a level that the text reaches with probability `reach`."""


class Source:
    """Fill the graphs of a batch.

    The engine reads the `width` likeliest tokens of each adaptive token's answer.
    """

    width = 1

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Begin new texts and discard the previous ones."""

    def begin(
        self, contexts: Sequence[Sequence[int]], depths: Sequence[int]
    ) -> Sequence[DraftGraph | None]:
        """Return each sequence's graph, at most `depths[b]` deep; None for a plain step.

        `contexts` are the whole texts so far; their last tokens are the graphs' roots.
        """
        raise NotImplementedError

    def grow(self, planner: LevelPlanner) -> int:
        """Grow the graphs by forwards of a draft model. Return the number of forwards."""
        return 0

    def probes(self, b: int, count: int, length: int) -> tuple[int, ...]:
        """Return `count` adaptive tokens to attach to a node of sequence b.

        Its text has `length` tokens so far. A source without adaptive tokens returns ().
        """
        return ()

    def dry_run(self, b: int, context: Sequence[int]) -> DraftGraph | None:
        """Return a graph for drafts that are not verified; it must need no forward."""
        return None

    def keep(self, b: int, drafts: Drafts | None, result: Verified) -> None:
        """Store the part of sequence b's result that its next draft needs."""

    def drop(self, b: int) -> None:
        """Remove sequence b; the batch's last sequence takes its index."""
