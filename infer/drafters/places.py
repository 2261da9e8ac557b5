"""The candidates of a step's places, from every source of drafts: adaptive tokens, the text, the training data.

    score(c) = log p_adaptive(c) + λ_j log s(c)      for place j, s(c) as in ngrams.py

log s is log(p_ngram / u) up to a constant of the place: what the n-grams know of a token beyond its frequency,
which the adaptive token knows as well. Behind the last place that adaptive tokens answered for, p_ngram alone
decides. Of sampled text the noise of each place is known (pick.py) and belongs to both.

The candidates for a place depend on the tokens before it, so a draft grows node by node, and is a tree.
"""

from collections.abc import Callable, Sequence
from heapq import nlargest
from math import exp, log

from infer.ngrams import LONGEST, TextNgrams
from infer.engine.pick import noise
from infer.engine.reading import Candidates
from infer.engine.sampling import GREEDY, Sampling
from infer.trees.token_graph import Drafts, TokenGraph, unroll

SOURCES = ("adaptive", "text", "ngrams")


class Places:
    """What may follow a text whose last token is the root of the next draft.

    `answers` are of the adaptive tokens, for the places behind the root; `width` bounds the candidates of a
    place. `graph` holds what was looked at so far, and `sources` names the source of each of its nodes.
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
        self.graph, self.sources = TokenGraph([text[-1]]), [""]
        self.answered = len(answers.ids) if answers else 0
        self._tail, self._position = tuple(text[-LONGEST:]), len(text)
        self._answers, self._ngrams, self._width = answers, ngrams, width
        self._temperature, self._seed = sampling.temperature, seed
        self._depths = [0]

    def grow(
        self, prices: Sequence[float], *, depth: int, calibrated: Callable[[float, int], float] | None = None
    ) -> Drafts:
        """Return the likeliest paths down to `depth`, while node n's chance is above `prices[n - 1]`.

        `calibrated` makes of a candidate's weight and its place how often such candidates are right.
        """
        return unroll(self.graph, prices, depth=depth, expand=self.expand, calibrated=calibrated)

    def expand(self, node: int) -> None:
        """Hang the candidates for the place behind a node under it."""
        place = self._depths[node]
        if place < self.answered:
            children = self._combined(node, place)
        else:
            children = self._by_ngrams(node, place)
        for weight, token, source in children:
            self.graph.add(node, token, weight)
            self.sources.append(source)
            self._depths.append(place + 1)

    def _combined(self, node: int, place: int) -> list[tuple[float, int, str]]:
        assert self._answers is not None
        ids, shares = self._answers.ids[place], self._answers.weights[place]
        if self._ngrams is None:
            return [(share, id, "adaptive") for id, share in zip(ids[: self._width], shares)]
        ratios, _, counted = self._ngrams.ratios(self._path(node))
        scores, total = dict(zip(ids, shares)), 1.0
        power = self._ngrams.weights.place(place) / (self._temperature or 1.0)
        for token, ratio in ratios.items():
            if share := scores.get(token):
                scores[token] = score = share * (1 + ratio) ** power
                total += score - share
        best = nlargest(self._width, ((score, -token) for token, score in scores.items()))
        return [
            (score / total, -token, "adaptive" if -token == ids[0] else _counted_in(counted, -token))
            for score, token in best
        ]

    def _by_ngrams(self, node: int, place: int) -> list[tuple[float, int, str]]:
        if self._ngrams is None:
            return []
        ratios, share, counted = self._ngrams.ratios(self._path(node))
        unigram = self._ngrams.unigram
        chances = {token: share * unigram(token) * (1 + ratio) for token, ratio in ratios.items()}
        total = 1.0
        if temperature := self._temperature:
            seed, position = self._seed, self._position + place
            rest = max(0.0, 1 - sum(chances.values())) ** (1 / temperature)
            chances = {
                token: exp(log(chance) / temperature + noise(seed, position, token))
                for token, chance in chances.items()
            }
            total = rest + sum(chances.values())
        best = nlargest(self._width, ((chance, -token) for token, chance in chances.items()))
        return [(chance / total, -token, _counted_in(counted, -token)) for chance, token in best]

    def _path(self, node: int) -> Sequence[int]:
        """The last tokens up to a node."""
        graph, path = self.graph, list[int]()
        while node:
            path.append(graph.tokens[node])
            node = graph.parents[node]
        return (*self._tail, *reversed(path))


def _counted_in(counted: Sequence[dict[int, int]], token: int) -> str:
    return "text" if any(token in counts for counts in counted) else "ngrams"
