r"""What became of one step's draft, in numbers. Pure functions of its graph, its tree and the accepted path.

    graph                    tree         accepted y b a c: each the likeliest child, ranks 1 1 1;
                                          c stands behind the merged a, and so the merging succeeded
        y                     y
       / \\                   / \
      b   a                 b   a
      |   |                 |   |
      a . c                 a   c
                            |
                            c

The paper's figures of runs with drafts (Table 1, Figures 5, 7 and 8). Pure.

Of a text's last step, whose tokens may be cut, the draft is not known: what is counted of graphs leaves that
step out. Where nothing was drafted a figure is None.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from infer.measure.runs import Run
from infer.trees.token_graph import Drafts, Outcome, TokenGraph


@dataclass(frozen=True, slots=True)
class Counts:
    """One step: the `nodes` of its graph without the root, the `levels` that were drafted, the `rows` that the
    draft model was fed, the `tokens` that it emitted, the rank of each accepted draft, and whether one of them
    was a copy.
    """

    nodes: int
    levels: int
    rows: int
    tokens: int
    ranks: tuple[int, ...]
    succeeded: bool

    @classmethod
    def of(cls, outcome: Outcome) -> "Counts":
        """Return the numbers of a step."""
        return cls(
            len(outcome.graph.tokens) - 1,
            depth(outcome.graph),
            outcome.rows,
            len(outcome.tokens),
            tuple(ranks(outcome.graph, outcome.drafts, outcome.path)),
            outcome.succeeded,
        )


def depth(graph: TokenGraph) -> int:
    """Return the levels of the graph as it was drafted: of the nodes' own paths, not of those through merged
    nodes.
    """
    depths = [0]
    for parent in graph.parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def ranks(graph: TokenGraph, drafts: Drafts, path: Sequence[int]) -> list[int]:
    """Return the rank of each accepted draft among its siblings: 1 is the likeliest (GSD, Appendix F)."""
    nodes = [drafts.nodes[node] for node in path]
    return [1 + graph.children[before].index(node) for before, node in pairwise(nodes)]


@dataclass(frozen=True, slots=True)
class DraftedRun(Run):
    """With what became of each draft but the last step's. Other steps without one drafted nothing."""

    counts: tuple[Counts, ...]


def acceptance_rate(runs: Sequence[DraftedRun]) -> float | None:
    """Return accepted drafts over levels drafted, the mean of the texts.

    The paper names no formula; its authors' code (`matchness`) adds a level for every forward of the draft
    model, whatever the number of nodes on it.
    """
    shares = []
    for run in runs:
        levels = sum(step.levels for step in run.counts)
        if levels:
            shares.append(sum(len(step.ranks) for step in run.counts) / levels)
    return fmean(shares) if shares else None


def drafted_share(runs: Sequence[Run]) -> float | None:
    """Return the share of the emitted tokens that were drafted: a/(a+1) at a accepted drafts a step."""
    if not any(run.drafted for run in runs):
        return None
    return sum(run.accepted for run in runs) / sum(len(run.tokens) for run in runs)


def accepted_per_step(runs: Sequence[Run]) -> float | None:
    """Return accepted drafts over verifications."""
    if not any(run.drafted for run in runs):
        return None
    return sum(run.accepted for run in runs) / sum(run.forwards for run in runs)


def drafted_per_token(runs: Sequence[DraftedRun]) -> float | None:
    """Return nodes of the graphs, each the draft model's candidate for a place, over emitted tokens."""
    return _share(sum(step.nodes for step in counts_of(runs)), _tokens(runs))


def fed_per_token(runs: Sequence[DraftedRun]) -> float | None:
    """Return rows of the draft model over emitted tokens: the nodes that got children, and the text itself."""
    return _share(sum(step.rows for step in counts_of(runs)), _tokens(runs))


def graph_success(runs: Sequence[DraftedRun]) -> float | None:
    """Return the share of drafts whose accepted path goes on behind a merged node."""
    counts = counts_of(runs)
    return _share(sum(step.succeeded for step in counts), len(counts))


def rank_shares(counts: Iterable[Counts], k: int) -> list[float] | None:
    """Return the share of the accepted drafts that were their parent's child of rank 1 to k."""
    by_rank = Counter(rank for step in counts for rank in step.ranks)
    total = by_rank.total()
    return [by_rank[rank] / total for rank in range(1, k + 1)] if total else None


def counts_of(runs: Iterable[DraftedRun]) -> list[Counts]:
    """Count over all runs."""
    return [step for run in runs for step in run.counts]


def _tokens(runs: Sequence[DraftedRun]) -> int:
    """Count over all steps but the last ones; 0 where nothing was drafted. A step without a draft emits one
    token.
    """
    counts = counts_of(runs)
    bare = sum(run.forwards - 1 - len(run.counts) for run in runs)
    return sum(step.tokens for step in counts) + bare if counts else 0


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
