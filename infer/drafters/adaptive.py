"""Drafts without a draft model: by adaptive tokens (SDSAT §2.1) and n-grams.

k adaptive tokens as probes under y_n predict the tokens n+2 .. n+k+1, while the model
itself predicts y_{n+1}. When these drafts are verified y_{n+1} is known, and n-grams
that end there are combined with them (places.py). A policy decides where probes hang:

- under a node of drafts that had no adaptive answers, else nowhere: the paper's two
  forwards in turn (eq. 1-3);
- under every node, or some: the next draft is made while this one is verified, with
  (k + 1) times the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from infer.drafters.places import Places
from infer.drafters.stopwatch import Stopwatch
from infer.engine.output import Candidates, Request
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafter, Verified
from infer.ngrams import Ngrams, TextNgrams
from infer.trees.lattice import nucleus_shape, nucleus_tree
from infer.trees.token_graph import Drafts, Outcome, Watch
from infer.trees.tree import Tree

#: Likeliest tokens of an adaptive token that are read: n-grams choose among them.
ANSWERS = 16


class Policy(Protocol):
    """How much is drafted, and where the probes hang."""

    @property
    def max_probes(self) -> int:
        """The most probes under a node."""

    @property
    def max_rows(self) -> int:
        """Rows of the largest tree."""

    @property
    def width(self) -> int:
        """Candidates for each place."""

    @property
    def resting(self) -> bool:
        """Whether the next step is plain."""

    def shape(self, places: Places, left: int) -> tuple[Drafts, Sequence[int], int]:
        """Return the drafts, at most `left` - 1 deep, the nodes to probe, and the probes under each."""

    def learn(self, places: Places | None, result: Verified, seconds: float) -> None:
        """Learn from a step, its candidates (None in a plain step), and its time."""

    def imagine(self, places: Places, left: int) -> Drafts | None:
        """Return drafts that show while the policy rests what they would gain, or None."""

    def learn_imagined(
        self, places: Places, drafts: Drafts, tokens: Sequence[int]
    ) -> bool:
        """Learn from such drafts and the tokens behind them; False if too few."""


@dataclass(frozen=True)
class FixedPolicy(Policy):
    """A fixed tree: up to `nodes` drafts (by default k) of `width` candidates a place.

    `probes`: "root" (the paper's two forwards), "all", or the number of nodes to probe,
    those likeliest to end the path. `tree`: "lattice", unrolled from the candidates'
    lattice by their weights, or "paper", the published shape.
    """

    k: int
    probes: str | int = "root"
    nodes: int | None = None
    width: int = 1
    tree: str = "lattice"

    resting = False

    @property
    def max_probes(self) -> int:
        """See Policy."""
        return self.k

    @property
    def drafted(self) -> int:
        """Drafts in a tree, at most."""
        if self.tree == "paper":
            return len(nucleus_shape(self.k))
        return self.nodes or self.k

    @property
    def max_rows(self) -> int:
        """Rows of the largest tree."""
        sites = {"root": 0, "all": 1 + self.drafted}.get(str(self.probes), self.probes)
        return max(
            1 + self.k, 1 + self.drafted + self.k * min(int(sites), 1 + self.drafted)
        )

    def shape(self, places: Places, left: int) -> tuple[Drafts, Sequence[int], int]:
        """Return the likeliest paths. Drafts without adaptive answers are probed."""
        if self.tree == "paper":
            drafts = nucleus_tree(places.graph, min(self.k, left - 1), places.expand)
        else:
            drafts = places.grow([0.0] * self.drafted, depth=left - 1)
        count = len(drafts.tokens)
        if self.probes == "root":
            return drafts, [] if places.answered else likely_ends(drafts, 1), self.k
        sites = likely_ends(drafts, count if self.probes == "all" else int(self.probes))
        return drafts, sorted(sites), self.k

    def learn(self, places: Places | None, result: Verified, seconds: float) -> None:
        """Do nothing: the shape is fixed."""

    def imagine(self, places: Places, left: int) -> None:
        """Return None: it never rests."""

    def learn_imagined(
        self, places: Places, drafts: Drafts, tokens: Sequence[int]
    ) -> bool:
        """Do nothing: the shape is fixed."""
        return True


def likely_ends(drafts: Drafts, count: int) -> list[int]:
    """Return the likeliest ends of the accepted path, the likeliest first."""
    endings = drafts.endings()
    return sorted(range(len(endings)), key=endings.__getitem__, reverse=True)[:count]


def check_probes(adaptive_ids: Sequence[int], k: int) -> None:
    """Raise ValueError for a k that is not positive, or beyond the diverse ids."""
    if k < 1 or (len(adaptive_ids) > 1 and k > len(adaptive_ids)):
        bounds = "at least 1" if len(adaptive_ids) == 1 else f"1 to {len(adaptive_ids)}"
        raise ValueError(f"k must be {bounds} adaptive tokens, got {k}")


def probe_ids(adaptive_ids: Sequence[int], k: int) -> tuple[int, ...]:
    """Return the ids of k probes: k times the only id, or the first k diverse ones.

    Raises ValueError as check_probes does.
    """
    check_probes(adaptive_ids, k)
    return tuple(adaptive_ids[:k]) if len(adaptive_ids) > 1 else (adaptive_ids[0],) * k


class AdaptiveDrafter(Drafter):
    """One sequence's drafts; without `ids` by n-grams alone.

    Sequences may share a policy. A policy that measures needs the batch's `stopwatch`;
    without one the policy learns nothing.
    """

    def __init__(
        self,
        ids: Sequence[int],
        policy: Policy,
        ngrams: Ngrams | None = None,
        watch: Watch | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._stopwatch = stopwatch
        self._probes = probe_ids(ids, policy.max_probes) if ids else ()
        self._policy = policy
        self._watch = watch
        self._ngrams = TextNgrams(ngrams) if ngrams else None
        self._answers: Candidates | None = None
        self._places: Places | None = None
        # While the policy rests: places, their drafts, and the text's length there.
        self._imagined: tuple[Places, Drafts, int] | None = None
        self._sampling = GREEDY
        self._seed = 0
        self.max_rows = policy.max_rows
        self.width = max(policy.width, ANSWERS) if ngrams else policy.width

    def start(self, request: Request, sampling: Sampling) -> None:
        """See Drafter. The noise of the request's draws is known."""
        self._sampling = sampling
        self._seed = request.seed
        if self._stopwatch:
            self._stopwatch.reset()

    def propose(self, context: Sequence[int], left: int) -> Tree:
        """See Drafter. Probes hang under the drafts if the text goes on behind them."""
        if self._stopwatch:
            self._stopwatch.start()
        if self._policy.resting:
            self._places = None
            if self._ngrams:
                self._imagine(context, left)
            return Tree.chain(context[-1])
        self._imagined = None
        self._places = self._places_behind(context, self._answers)
        drafts, sites, k = self._policy.shape(self._places, left)
        self._drafts = drafts
        sources = tuple(map(self._places.source, drafts.nodes))
        tree = Tree(
            tuple(drafts.tokens),
            tuple(drafts.parents),
            len(drafts.tokens),
            sources=sources,
        )
        # No row is deeper than the last token that may be fed: positions end somewhere.
        k = min(k, left - 2, len(self._probes))
        sites = [node for node in sites if drafts.depths[node] + k < left]
        return tree.probe(sites, self._probes[:k]) if k > 0 and sites else tree

    def _places_behind(
        self, context: Sequence[int], answers: Candidates | None
    ) -> Places:
        policy = self._policy
        return Places(
            context, answers, self._ngrams, policy.width, self._sampling, self._seed
        )

    def _imagine(self, context: Sequence[int], left: int) -> None:
        """Draft without rows, or compare such a draft with the text by now."""
        if self._imagined:
            places, drafts, start = self._imagined
            if not self._policy.learn_imagined(places, drafts, context[start:]):
                return
        places = self._places_behind(context, None)
        drawn = self._policy.imagine(places, left)
        self._imagined = (places, drawn, len(context)) if drawn else None

    def observe(self, result: Verified) -> None:
        """See Drafter. The answers behind the accepted path draft the next step."""
        if self._stopwatch:
            with self._stopwatch.observing() as seconds:
                self._policy.learn(self._places, result, seconds)
        if self._watch and self._places:
            self._watch(
                Outcome(
                    self._places.graph, self._drafts, list(result.path), result.tokens
                )
            )
        self._answers = result.answers
