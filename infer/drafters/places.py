"""Candidates for the places of a draft: from adaptive tokens, the text, training data.

    p(c) = (1 - λ_j) p_adaptive(c) + λ_j p_ngram(c)      for place j

Behind the last place with an answer of an adaptive token p_ngram (ngrams.py) alone
decides. The noise of a place of sampled text is known (pick.py) and is part of both
distributions.

The candidates for a place depend on the tokens before it: a draft is a tree that grows
node by node.
"""

from collections.abc import Callable, Sequence
from math import exp

from infer.engine.output import Candidates
from infer.engine.pick import noise
from infer.engine.sampling import GREEDY, Sampling
from infer.ngrams import LONGEST, TextNgrams
from infer.trees.token_graph import Drafts, TokenGraph, unroll

#: Scores by token, their total, and the text's counts by n-gram length.
Scores = tuple[dict[int, float], float, Sequence[dict[int, int]]]
#: Ids by falling weight, and their weights.
Answer = tuple[Sequence[int], Sequence[float]]
SOURCES = ("adaptive", "text", "ngrams")
#: Largest power of a chance: near a temperature of 0 greater ones underflow.
MAX_POWER = 24.0
#: Likeliest successors whose noise is computed: it seldom lifts others above them.
NOISY = 6


class Places:
    """Candidates that follow a text; its last token is the root of the next draft.

    A place has at most `width` candidates, from the adaptive tokens' `answers` and from
    n-grams. `graph` holds the candidates that were computed so far.
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
        self._tails = {0: tuple(text[-LONGEST:])}
        self._position = len(text)
        self._text = text
        self._answers = answers
        self._ngrams = ngrams
        self._width = width
        self._sampling = sampling
        self._seed = seed
        # By node: the place of its children, and the text's counts for its siblings.
        self._places = [0]
        self._counted: list[Sequence[dict[int, int]]] = [()]
        # By node: the answers for its children, as the node's token corrects them.
        self._corrected: dict[int, Answer] = {}

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
        """Return the likeliest paths down to `depth`.

        Node n is drafted if its chance is above `prices[n - 1]`. `calibrated` maps a
        candidate's weight and place to the share of such candidates that are right.
        """
        return unroll(
            self.graph, prices, depth=depth, expand=self.expand, calibrated=calibrated
        )

    def expand(self, node: int) -> None:
        """Add the candidates for the next place under a node."""
        place = self._places[node]
        scores: dict[int, float]
        counted: Sequence[dict[int, int]] = ()
        if self._ngrams is None:
            scores = dict(zip(*self._answer(node))) if place < self.answered else {}
            total = 1.0
        else:
            if not node:
                # A plain step needs no n-grams: they are updated here.
                self._ngrams.extend(self._text)
            else:
                tail = self._tails[self.graph.parents[node]]
                self._tails[node] = (*tail, self.graph.tokens[node])[-LONGEST:]
            if place < self.answered:
                scores, total, counted = self._combined(self._ngrams, node)
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
        """Return the source of a node, "" for the root.

        It is "adaptive" for the likeliest answer and for answers that no n-gram has,
        "text" for other tokens that the text has counts of, "ngrams" for the rest.
        """
        token = self.graph.tokens[node]
        place = self._places[node] - 1
        if not node:
            return ""
        parent = self.graph.parents[node]
        answered = self._answer(parent)[0] if place < self.answered else []
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

    def _answer(self, node: int) -> Answer:
        """Return the answer for the place under a node, by falling weight."""
        answers = self._answers
        assert answers is not None
        place = self._places[node]
        ids = answers.ids[place]
        if answers.correct is None:
            return ids, answers.weights[place]
        if node not in self._corrected:
            scores = answers.correct(place, self.graph.tokens[node], ids)
            if temperature := self._sampling.temperature:
                position = self._position + place
                scores = [
                    score / temperature + noise(self._seed, position, id)
                    for score, id in zip(scores, ids)
                ]
            largest = max(scores)
            shares = {id: exp(score - largest) for score, id in zip(scores, ids)}
            total = sum(shares.values())
            order = sorted(ids, key=shares.__getitem__, reverse=True)
            self._corrected[node] = order, [shares[id] / total for id in order]
        return self._corrected[node]

    def _combined(self, ngrams: TextNgrams, node: int) -> Scores:
        place = self._places[node]
        by_ngrams, total, counted = self._by_ngrams(ngrams, self._tails[node], place)
        λ = ngrams.weights.place(place)
        scores = {id: (1 - λ) * share for id, share in zip(*self._answer(node))}
        for token, score in by_ngrams.items():
            scores[token] = scores.get(token, 0.0) + λ * score / total
        return scores, 1.0, counted

    def _by_ngrams(
        self, ngrams: TextNgrams, tail: tuple[int, ...], place: int
    ) -> Scores:
        chances, D, counted = ngrams.successors(tail)
        if not self._sampling.temperature:
            return chances, 1 / D, counted
        seed = self._seed
        position = self._position + place
        power = min(1 / self._sampling.temperature, MAX_POWER)
        likeliest = sorted(chances, key=chances.__getitem__, reverse=True)[:NOISY]
        rest = max(0.0, 1 - D * sum(chances[token] for token in likeliest)) ** power
        chances = {
            token: (D * chances[token]) ** power * exp(noise(seed, position, token))
            for token in likeliest
        }
        return chances, rest + sum(chances.values()), counted
