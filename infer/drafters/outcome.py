"""A draft and its verification, for infer.graph and measurements."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from infer.trees.token_graph import Drafts, TokenGraph


class Fate(Enum):
    """What became of a node of the graph; a `SHARED` node was reached through a merged node."""

    ACCEPTED = "accepted"
    SHARED = "accepted behind a merged node"
    REJECTED = "verified, rejected"
    DRAFTED = "not verified"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The draft of one sequence in one step, and its verification.

    `drafts` is the tree that was verified, whose `nodes` say where each of its nodes stands in the graph;
    `path` are its accepted nodes from the root on; `tokens` are theirs without the root's, and the target's own
    token behind them.
    """

    graph: TokenGraph
    drafts: Drafts
    path: list[int]
    tokens: list[int]
    rows: int = 0  # of the draft model for it, with those of the text, without probes

    @property
    def accepted(self) -> list[int]:
        """The accepted path's nodes of the graph, from the root on."""
        return [self.drafts.nodes[node] for node in self.path]

    @property
    def succeeded(self) -> bool:
        """Whether the accepted path goes on behind a merged node (GSD §6.2, "graph success")."""
        return any(node in self.graph.merged for node in self.accepted[:-1])

    @property
    def fates(self) -> list[Fate]:
        """Of each node of the graph; a node with several copies in the tree fares as the best of them."""
        fates = [Fate.DRAFTED] * len(self.graph.tokens)
        for node in self.drafts.nodes:
            fates[node] = Fate.REJECTED
        fate, path = Fate.ACCEPTED, self.accepted
        for before, node in zip([-1, *path], path):
            if self.graph.parents[node] != before:
                fate = Fate.SHARED
            fates[node] = fate
        return fates


Watch = Callable[[Outcome], None]  # called with every draft but a sequence's last
