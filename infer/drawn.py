"""A step's draft and what came of it, for those who look on: infer.graph, and measurements. Pure data."""

from collections.abc import Callable
from dataclasses import dataclass

from infer.token_graph import Drafts, TokenGraph


@dataclass(frozen=True, slots=True)
class Drawn:
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
    ms: float = 0.0  # that a draft model's drafting took, for all sequences


Watch = Callable[[Drawn], None]  # told every draft, but for that of a sequence's last step
