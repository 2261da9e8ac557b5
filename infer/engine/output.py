"""The output of a forward: picks along a path, and drafts for the places after it.

On a CPU values are computed when they are read, since most rows of a tree with probes
under every node are never read. On a GPU reading costs more than computing, so all values
are computed with the forward and copied to the host at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from infer.engine.head import CORRECTED, Correct, PreviousTokenHead
from infer.engine.pick import (
    Logits,
    candidates,
    conditional_distribution,
    draw,
    likeliest,
    pick,
    probabilities,
)
from infer.engine.sampling import Sampling
from infer.trees.tree import FlatTrees, Tree

EMPTY = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Request:
    """A prompt of at least one token, a seed, and processors to apply before sampling."""

    prompt: Sequence[int]
    seed: int = 0
    processors: LogitsProcessorList | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """Drafts for the k places after a node's pick, in order of decreasing weight.

    The weight of a candidate is its share among the best candidates for its place. If
    `correct` is set, it computes a place's logits given the token before the place.
    """

    ids: list[list[int]]
    weights: list[list[float]]
    correct: Correct | None = None


def needs_logits(tree: Tree, request: Request) -> bool:
    """Return True if picks of this tree depend on the path or on draws."""
    return bool(request.processors) or tree.drawn is not None


class LazyOutput:
    """The B * q rows of logits of a forward, evaluated on demand.

    `agree` replaces a result by rank 0's. `head` corrects the candidates of probes.
    """

    def __init__(
        self,
        logits: Logits,
        flat: FlatTrees,
        trees: Sequence[Tree],
        requests: Sequence[Request],
        sampling: Sampling,
        agree: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        head: PreviousTokenHead | None = None,
    ) -> None:
        self._head = head
        self.logits = logits
        self.flat = flat
        self.trees = trees
        self._requests = requests
        self._sampling = sampling
        self._agree = agree
        self._picks: list[list[int]] | None = None

    def is_finite(self) -> bool:
        """Return True if the hidden states of all drafts are finite."""
        B, q = self.flat.ids.shape
        hidden = self.logits.hidden.view(B, q, -1)[:, : self.flat.drafts]
        return bool(self._agree(hidden.isfinite().all()))

    def chooser(self, b: int, context: Sequence[int]) -> Callable[[int], int]:
        """Return a function from a node of tree b to the pick after it.

        The function must be called along one path from the root. `context` ends with the
        root's token.
        """
        processors = self._requests[b].processors
        if processors:
            return self._processed(b, list(context), processors)
        sampling = self._sampling
        # Greedy picks and top_k read only the leading tokens, so all rows are picked at once.
        cheap = not sampling.temperature or sampling.top_k
        if self.trees[b].drawn is not None or not cheap:
            return lambda node: self._pick(b, node, self.logits[self._rows(b, [node])])
        if self._picks is None:
            self._picks = self._pick_all()
        return self._picks[b].__getitem__

    def drafts(self, b: int, node: int, width: int) -> Candidates | None:
        """Return `width` candidates per probe under a node; None without probes."""
        probes = self.trees[b].probes_of(node)
        if not probes:
            return None
        width = max(width, CORRECTED if self._head else 0)
        answers = self._candidates(candidates, b, probes, width)
        if self._head is None:
            return answers
        hidden = self._agree(self.logits[self._rows(b, probes)].hidden)
        return replace(answers, correct=self._head.correct(hidden))

    def next_candidates(self, b: int, nodes: Sequence[int], width: int) -> Candidates:
        """Return the likeliest tokens after adjacent nodes of a draft model's tree b.

        Their weights are probabilities.
        """
        return self._candidates(likeliest, b, nodes, width)

    def draws(
        self, b: int, nodes: Sequence[int], k: int, generator: torch.Generator
    ) -> tuple[Candidates, Tensor]:
        """Return up to k tokens drawn after each node, in order, with their probabilities.

        Also return the (n, V) distributions that the tokens were drawn from.
        """
        logits = self.logits[self._rows(b, nodes)]
        q_nV = probabilities(logits, self._sampling)
        invalid = q_nV.sum(-1, keepdim=True).isnan()
        # A draft model that overflows draws from the uniform distribution: verification
        # works with any distribution.
        if invalid.any():
            q_nV = q_nV.masked_fill(invalid, 1 / q_nV.shape[1])
        q_nV = self._agree(q_nV)
        ids_nk = self._agree(draw(q_nV, k, generator))
        chances = q_nV.gather(1, ids_nk.clamp(min=0)).tolist()
        ids = [[id for id in row if id >= 0] for row in ids_nk.tolist()]
        weights = [row[: len(drawn)] for row, drawn in zip(chances, ids)]
        return Candidates(ids, weights), q_nV

    def _candidates(
        self,
        choose: Callable[..., tuple[Tensor, Tensor]],
        b: int,
        nodes: Sequence[int],
        width: int,
    ) -> Candidates:
        rows = self._rows(b, nodes)
        ids, weights = choose(
            self.logits[rows], self._sampling, *self._keys(b, rows), width
        )
        return Candidates(self._agree(ids).tolist(), self._agree(weights).tolist())

    def _pick_all(self) -> list[list[int]]:
        """Return the picks after all drafts of all trees."""
        B = len(self._requests)  # the rows may have more sequences, as padding
        q, drafts = self.flat.ids.shape[1], self.flat.drafts
        device = self.logits.device
        rows: slice | list[int] = slice(0, drafts)
        if B > 1:
            rows = [b * q + row for b in range(B) for row in range(drafts)]
        positions = torch.from_numpy(self.flat.positions[:B, :drafts].ravel() + 1)
        seeds = torch.tensor([request.seed for request in self._requests])
        seeds = seeds.repeat_interleave(drafts)
        picks = pick(
            self.logits[rows], self._sampling, positions.to(device), seeds.to(device)
        )
        result: list[list[int]] = self._agree(picks).view(B, drafts).tolist()
        return result

    def _processed(
        self, b: int, context: list[int], processors: LogitsProcessorList
    ) -> Callable[[int], int]:
        """Return a chooser that applies Transformers' processors along the path."""
        tree = self.trees[b]

        def choose(node: int) -> int:
            if node:
                context.append(tree.tokens[node])
            logits = self.logits[self._rows(b, [node])]
            ids: Any = torch.tensor([context], device=logits.device)
            scores: Any = logits.whole().clone()
            return self._pick(b, node, logits.replaced(processors(ids, scores)))

        return choose

    def _pick(self, b: int, node: int, logits: Logits) -> int:
        """Return the pick after a node, given the drawn children if the node has any."""
        tree = self.trees[b]
        sampling = self._sampling
        if tree.drawn is not None and node in tree.drawn:
            children = [tree.tokens[child] for child in tree.children(node)]
            distribution = conditional_distribution(
                probabilities(logits, sampling),
                tree.drawn[node][None],
                torch.tensor([children], device=logits.device),
            )
            logits = logits.replaced(distribution.log())
            sampling = Sampling(1.0)
        keys = self._keys(b, self._rows(b, [node]))
        return int(self._agree(pick(logits, sampling, *keys)))

    def _rows(self, b: int, nodes: Sequence[int]) -> slice:
        first = b * self.flat.ids.shape[1] + self.flat.row(b, self.trees[b], nodes[0])
        return slice(first, first + len(nodes))

    def _keys(self, b: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the positions and seeds that the rows' noise depends on."""
        if not self._sampling.temperature:
            return EMPTY, EMPTY
        positions = torch.from_numpy(self.flat.positions.ravel()[rows] + 1)
        positions = positions.to(self.logits.device)
        return positions, torch.full_like(positions, self._requests[b].seed)


@dataclass(frozen=True, slots=True)
class PackedOutput:
    """Values on the host that were computed with the forward.

    A target has picks after all drafts and candidates for all probes. A draft model has
    candidates after every row and no picks. In a forward with probes a pick is -1 if its
    row is not finite.
    """

    picks: npt.NDArray[np.int64]  # (B, D)
    ids: npt.NDArray[np.int64]  # (B, P or D + P, W)
    weights: npt.NDArray[np.float64]
    flat: FlatTrees
    trees: Sequence[Tree]
    head: PreviousTokenHead | None = None
    hidden: Tensor | None = None  # (B, P, d), hidden states of the probes, with a head

    def is_finite(self) -> bool:
        """See LazyOutput."""
        return bool((self.picks >= 0).all())

    def chooser(self, b: int, context: Sequence[int]) -> Callable[[int], int]:
        """See LazyOutput."""
        picks: list[int] = self.picks[b].tolist()
        return picks.__getitem__

    def drafts(self, b: int, node: int, width: int) -> Candidates | None:
        """See LazyOutput."""
        probes = self.trees[b].probes_of(node)
        if not probes:
            return None
        first = self.flat.row(b, self.trees[b], probes[0]) - self.flat.drafts
        width = max(width, CORRECTED if self.head else 0)
        answers = self._candidates(b, first, len(probes), width)
        if self.head is None or self.hidden is None:
            return answers
        hidden = self.hidden[b, first : first + len(probes)]
        return replace(answers, correct=self.head.correct(hidden))

    def next_candidates(self, b: int, nodes: Sequence[int], width: int) -> Candidates:
        """See LazyOutput."""
        first = self.flat.row(b, self.trees[b], nodes[0])
        return self._candidates(b, first, len(nodes), width)

    def _candidates(self, b: int, first: int, count: int, width: int) -> Candidates:
        rows = (b, slice(first, first + count), slice(width))
        return Candidates(self.ids[rows].tolist(), self.weights[rows].tolist())


ForwardOutput: TypeAlias = LazyOutput | PackedOutput
