"""What a forward returns: the picks along a path, and the drafts behind it.

On a CPU it is read as far as it is asked: most rows of a one-forward tree are never looked at. On a GPU
questions cost more than answers: everything is computed with the forward, and comes over in one copy.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from infer.engine.pick import (
    LEADERS,
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
    """A prompt of at least one token, the seed of its draws, and processors that come before the sampling."""

    prompt: Sequence[int]
    seed: int = 0
    processors: LogitsProcessorList | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """Drafts for the k places behind a node's pick, the likeliest first; `weights` are their shares."""

    ids: list[list[int]]
    weights: list[list[float]]


class LazyOutput:
    """Reads B * q rows of logits as far as it is asked. `agree` makes the answers those of all ranks."""

    def __init__(
        self,
        logits: Logits,
        flat: FlatTrees,
        trees: Sequence[Tree],
        requests: Sequence[Request],
        sampling: Sampling,
        agree: Callable[[Tensor], Tensor] = lambda picked: picked,
    ) -> None:
        self._agree = agree
        self.logits = logits
        self.flat = flat
        self.trees = trees
        self._requests = requests
        self._sampling = sampling
        self._picks: list[list[int]] | None = None

    def chooser(self, b: int, context: Sequence[int]) -> Callable[[int], int]:
        """Return a function from a node of tree b to the pick after it, called along one path from the root.

        `context` are the tokens up to and with the root.
        """
        processors = self._requests[b].processors
        if processors:
            return self._processed(b, list(context), processors)
        if self.trees[b].drawn is not None or not self._sampling.cheap:
            return lambda node: self._pick(b, node, self.logits[self._rows(b, [node])])
        if self._picks is None:
            self._picks = self._pick_all()
        return self._picks[b].__getitem__

    def drafts(self, b: int, node: int, width: int) -> Candidates | None:
        """Return the candidates of the probes under a node of tree b; None where it has none."""
        tree = self.trees[b]
        probes = tree.probes_of(node)
        if not probes:
            return None
        rows = self._rows(b, probes)
        best = candidates(
            self.logits[rows], self._sampling, *self._keys(b, rows), width
        )
        ids, weights = map(self._agree, best)
        return Candidates(ids.tolist(), weights.tolist())

    def next_candidates(self, b: int, nodes: Sequence[int], width: int) -> Candidates:
        """Return the likeliest tokens behind adjacent nodes of a draft model's tree b, with their chances."""
        rows = self._rows(b, nodes)
        chances, ids = likeliest(
            self.logits[rows], self._sampling, *self._keys(b, rows), width
        )
        return Candidates(self._agree(ids).tolist(), self._agree(chances).tolist())

    def draws(
        self, b: int, nodes: Sequence[int], k: int, generator: torch.Generator
    ) -> tuple[Candidates, Tensor]:
        """Return up to k tokens drawn behind each node, in order, and (n, V) what they were drawn from."""
        q = self._agree(
            probabilities(self.logits[self._rows(b, nodes)], self._sampling)
        )
        drawn = self._agree(draw(q, k, generator))
        ids = [[id for id in row if id >= 0] for row in drawn.tolist()]
        chances = q.gather(1, drawn.clamp(min=0)).tolist()
        return Candidates(
            ids, [row[: len(drawn_ids)] for row, drawn_ids in zip(chances, ids)]
        ), q

    def _pick_all(self) -> list[list[int]]:
        flat = self.flat
        n = len(self.trees)
        device = self.logits.device
        q = flat.ids.shape[1]
        drafts = flat.drafts
        rows = (
            [b * q + row for b in range(n) for row in range(drafts)]
            if n > 1
            else slice(0, drafts)
        )
        positions = torch.from_numpy(flat.positions[:, :drafts].ravel() + 1)
        seeds = torch.tensor(
            [request.seed for request in self._requests]
        ).repeat_interleave(drafts)
        picks = pick(
            self.logits[rows], self._sampling, positions.to(device), seeds.to(device)
        )
        return self._agree(picks).view(n, drafts).tolist()

    def _processed(
        self, b: int, context: list[int], processors: LogitsProcessorList
    ) -> Callable[[int], int]:
        """Return a chooser that applies the library's processors to the tokens before each place."""
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
        """Return the pick after a node, of the target's distribution or what the draws leave of it."""
        tree = self.trees[b]
        sampling = self._sampling
        if tree.drawn is not None and node in tree.drawn:
            ids = torch.tensor(
                [[tree.tokens[child] for child in tree.children(node)]],
                device=logits.device,
            )
            left = conditional_distribution(
                probabilities(logits, sampling), tree.drawn[node][None], ids
            )
            logits = logits.replaced(left.log())
            sampling = Sampling(1.0)
        return int(
            self._agree(pick(logits, sampling, *self._keys(b, self._rows(b, [node]))))
        )

    def _rows(self, b: int, nodes: Sequence[int]) -> slice:
        first = b * self.flat.ids.shape[1] + self.flat.row(b, self.trees[b], nodes[0])
        return slice(first, first + len(nodes))

    def _keys(self, b: int, rows: slice) -> tuple[Tensor, Tensor]:
        if not self._sampling.temperature:
            return EMPTY, EMPTY  # nothing is drawn
        positions = torch.from_numpy(self.flat.positions.ravel()[rows] + 1)
        positions = positions.to(self.logits.device)
        return positions, torch.full_like(positions, self._requests[b].seed)


@dataclass(frozen=True, slots=True)
class Packed:
    """The `picks` (B, D) of all drafts' rows; the leaders' `ids` and `scores` (B, P, W) of all probes'.

    For a draft model no picks, and ids and chances (B, D + P, W) of all rows.
    """

    picks: np.ndarray
    ids: np.ndarray
    scores: np.ndarray

    @classmethod
    def unpack(
        cls, numbers: np.ndarray, picked: tuple[int, int], led: tuple[int, int, int]
    ) -> "Packed":
        """Unpack float64 numbers in this order."""
        picks, ids, scores = np.split(
            numbers, np.cumsum([math.prod(picked), math.prod(led)])
        )
        return cls(
            picks.astype(np.int64).reshape(picked),
            ids.astype(np.int64).reshape(led),
            scores.reshape(led),
        )


def on_host(tree: Tree, request: Request) -> bool:
    """Return whether this tree's picks need the logits, one node after the other, or draws for it do."""
    return bool(request.processors) or tree.drawn is not None


@dataclass(frozen=True, slots=True)
class PackedOutput:
    """Looks up what was computed with the forward; what `on_host` says is left to a LazyOutput."""

    packed: Packed
    flat: FlatTrees
    trees: Sequence[Tree]
    requests: Sequence[Request]
    lazy: LazyOutput | None = None

    def chooser(self, b: int, context: Sequence[int]) -> Callable[[int], int]:
        """See LazyOutput."""
        if self.lazy is not None and on_host(self.trees[b], self.requests[b]):
            return self.lazy.chooser(b, context)
        return self.packed.picks[b].tolist().__getitem__

    def drafts(self, b: int, node: int, width: int) -> Candidates | None:
        """See LazyOutput."""
        tree = self.trees[b]
        packed = self.packed
        probes = tree.probes_of(node)
        if not probes:
            return None
        first = probes[0] - tree.probes_from
        rows = slice(first, first + len(probes))
        scores = torch.from_numpy(packed.scores[b, rows, : max(width, LEADERS)])
        weights = scores.softmax(-1).nan_to_num(0.0)[:, :width]
        return Candidates(packed.ids[b, rows, :width].tolist(), weights.tolist())

    def next_candidates(self, b: int, nodes: Sequence[int], width: int) -> Candidates:
        """See LazyOutput."""
        first = self.flat.row(b, self.trees[b], nodes[0])
        leaders = b, slice(first, first + len(nodes)), slice(width)
        return Candidates(
            self.packed.ids[leaders].tolist(), self.packed.scores[leaders].tolist()
        )

    def draws(
        self, b: int, nodes: Sequence[int], k: int, generator: torch.Generator
    ) -> tuple[Candidates, Tensor]:
        """See LazyOutput."""
        assert self.lazy is not None
        return self.lazy.draws(b, nodes, k, generator)


ForwardOutput: TypeAlias = LazyOutput | PackedOutput
