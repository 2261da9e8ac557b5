"""The candidates of a step's places, from every source of drafts: adaptive tokens, the text, the training data.

    score(c) = log p_adaptive(c) + λ_j (log p_ngram(c) - log u(c))      for place j

log p_ngram - log u is what the n-grams (ngrams.py) know of a token beyond its frequency, which the adaptive
token knows as well; a factor that all candidates of a place share is left out. Behind the last place that
adaptive tokens answered for, p_ngram alone decides. Of sampled text the noise of each place is known (pick.py)
and belongs to both.

The candidates for a place depend on the tokens before it, so a draft grows node by node, and is a tree.
"""

from collections.abc import Callable, Sequence
from math import exp, log

from infer.engine.output import Candidates
from infer.engine.pick import noise
from infer.engine.sampling import GREEDY, Sampling
from infer.ngrams import LONGEST, TextNgrams
from infer.trees.token_graph import Drafts, TokenGraph, unroll

Scores = tuple[
    dict[int, float], float, Sequence[dict[int, int]]
]  # by token, their total, the text's counts
SOURCES = ("adaptive", "text", "ngrams")
STEEPEST = (
    24.0  # power of a chance: of greater ones, near a temperature of 0, all underflow
)
NOISY = 6  # likeliest successors whose noise is looked at: it seldom lifts others above them
UNREAD = 0.25  # of the last answer's share: that of a token which is not among the answers that are read


class Places:
    """What may follow a text whose last token is the root of the next draft: at most `width` candidates of a
    place, of the adaptive tokens' `answers` and n-grams. `graph` holds what was looked at so far.
    """

    def __init__(
        self,
        text: Sequence[int],
        answers: Candidates | None,
        ngrams: TextNgrams | None,
        width: int,
        sampling: Sampling = GREEDY,
        seed: int = 0,
    ) -> None:
        self.graph = TokenGraph([text[-1]])
        self.answered = len(answers.ids) if answers else 0
        self.has_ngrams = (
            ngrams is not None
        )  # whether anything is drafted where adaptive tokens did not answer
        self._tails = {0: tuple(text[-LONGEST:])}
        self._position = len(text)
        self._text = text
        self._answers = answers
        self._ngrams = ngrams
        self._width = width
        self._sampling = sampling
        self._seed = seed
        self._places = [0]  # by node, that of its children
        self._counted: list[Sequence[dict[int, int]]] = [
            ()
        ]  # by node, what its siblings were counted in

    def unanswered(self) -> "Places":
        """Return the same without the adaptive tokens' answers."""
        return Places(
            self._text, None, self._ngrams, self._width, self._sampling, self._seed
        )

    def grow(
        self,
        prices: Sequence[float],
        *,
        depth: int,
        calibrated: Callable[[float, int], float] | None = None,
    ) -> Drafts:
        """Return the likeliest paths down to `depth`, while node n's chance is above `prices[n - 1]`.

        `calibrated` makes of a candidate's weight and its place how often such candidates are right.
        """
        return unroll(
            self.graph, prices, depth=depth, expand=self.expand, calibrated=calibrated
        )

    def expand(self, node: int) -> None:
        """Hang the candidates for the place behind a node under it."""
        place = self._places[node]
        scores: dict[int, float]
        counted: Sequence[dict[int, int]] = ()
        if self._ngrams is None:
            scores = self._answered(place)
            total = 1.0
        else:
            if not node:
                self._ngrams.extend(
                    self._text
                )  # as late as this: a plain step has no use for it
            else:
                tail = self._tails[self.graph.parents[node]]
                self._tails[node] = (*tail, self.graph.tokens[node])[-LONGEST:]
            if place < self.answered:
                scores, total, counted = self._combined(
                    self._ngrams, self._tails[node], place
                )
            else:
                scores, total, counted = self._by_ngrams(
                    self._ngrams, self._tails[node], place
                )
        if self._width == 1:
            best = [max(scores, key=scores.__getitem__)] if scores else []
        else:
            best = sorted(scores, key=scores.__getitem__, reverse=True)[: self._width]
        for token in best:
            self.graph.add(node, token, scores[token] / total)
            self._counted.append(counted)
            self._places.append(place + 1)

    def source(self, node: int) -> str:
        """Return the first source that proposes a node by itself, "" for the root: adaptive tokens their
        likeliest answer and those that no n-gram knows, the text what it counts, the training data the rest.
        """
        token = self.graph.tokens[node]
        place = self._places[node] - 1
        if not node:
            return ""
        answered = (
            self._answers.ids[place] if self._answers and place < self.answered else []
        )
        if token in answered and (token == answered[0] or not self._is_known(node)):
            return "adaptive"
        return (
            "text"
            if any(token in counts for counts in self._counted[node])
            else "ngrams"
        )

    def _is_known(self, node: int) -> bool:
        if self._ngrams is None:
            return False
        successors, _, _ = self._ngrams.successors(
            self._tails[self.graph.parents[node]]
        )
        return self.graph.tokens[node] in successors

    def _answered(self, place: int) -> dict[int, float]:
        if self._answers is None or place >= self.answered:
            return {}
        return dict(zip(self._answers.ids[place], self._answers.weights[place]))

    def _combined(
        self, ngrams: TextNgrams, tail: tuple[int, ...], place: int
    ) -> Scores:
        successors, _, counted = ngrams.successors(tail)
        assert self._answers is not None
        ids = self._answers.ids[place]
        weights = self._answers.weights[place]
        shares = dict(zip(ids, weights))
        unigrams = ngrams.unigrams
        power = ngrams.weights.place(place) / (self._sampling.temperature or 1.0)
        exponents = {
            token: power * log(chance / unigrams[token])
            for token, chance in successors.items()
        }
        # All scores are scaled by the largest factor: near a temperature of 0 it is beyond all floats.
        largest = max(0.0, *exponents.values()) if exponents else 0.0
        total = scale = exp(-largest)
        scores = {token: share * scale for token, share in shares.items()}
        least = UNREAD * weights[-1]
        for token, exponent in exponents.items():
            share = shares.get(token, least)
            scores[token] = score = share * exp(exponent - largest)
            total += score - share * scale
        return scores, total or 1.0, counted

    def _by_ngrams(
        self, ngrams: TextNgrams, tail: tuple[int, ...], place: int
    ) -> Scores:
        chances, D, counted = ngrams.successors(tail)
        if not self._sampling.temperature:
            return chances, 1 / D, counted
        seed = self._seed
        position = self._position + place
        power = min(1 / self._sampling.temperature, STEEPEST)
        likeliest = sorted(chances, key=chances.__getitem__, reverse=True)[:NOISY]
        rest = max(0.0, 1 - D * sum(chances[token] for token in likeliest)) ** power
        chances = {
            token: (D * chances[token]) ** power * exp(noise(seed, position, token))
            for token in likeliest
        }
        return chances, rest + sum(chances.values()), counted
