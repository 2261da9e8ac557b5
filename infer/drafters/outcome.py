"""A step's draft and what came of it, for those who look on: infer.graph, and measurements. Pure data."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from infer.trees.token_graph import Drafts, TokenGraph


class Fate(Enum):
    """Of a node of the graph. `SHARED` is an accepted one that the path came to through a merged node."""

    ACCEPTED = "accepted"
    SHARED = "accepted behind a merged node"
    REJECTED = "verified, rejected"
    DRAFTED = "not verified"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was drafted for one sequence and step, and what the target said to it.

    `drafts` is the tree that was verified, whose `nodes` say where each of its nodes stands in the graph;
    `path` are its accepted nodes from the root on; `tokens` are theirs without the root's, and the target's
    own behind them.
    """

    graph: TokenGraph
    drafts: Drafts
    path: list[int]
    tokens: list[int]
    rows: int = 0  # that a draft model was fed for it, the text's among them, probes not

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
        found = [Fate.DRAFTED] * len(self.graph.tokens)
        for node in self.drafts.nodes:
            found[node] = Fate.REJECTED
        fate, path = Fate.ACCEPTED, self.accepted
        for before, node in zip([-1, *path], path):
            if self.graph.parents[node] != before:
                fate = Fate.SHARED
            found[node] = fate
        return found


Watch = Callable[[Outcome], None]  # told every draft, but for that of a sequence's last step
