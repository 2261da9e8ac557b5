"""Draft from adaptive tokens (SDSAT §2.1) and n-grams of the text and the training data.

k adaptive tokens, fed as probes under y_n, predict the tokens at places n+2 .. n+k+1.
Their predictions are called answers. The candidates for a place combine the answers with
the usual successors of the tokens before it:

    p(c) = (1 - λ) p_adaptive(c) + λ p_ngram(c),  λ = λ_j / (1 + temperature)  for place j

N-grams predict text worse when it is sampled at a higher temperature. After the last place
with an answer, p_ngram (ngrams.py) alone decides. The sampling noise of each place is known
in advance (pick.py) and is part of both distributions.

The candidates for a place depend on the tokens before it, so a draft is a tree that grows
node by node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite

from infer.drafters.source import DraftGraph, Source
from infer.engine.noise import noise
from infer.engine.output import Candidates, Request
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Verified
from infer.ngrams import LONGEST, Ngrams, TextNgrams
from infer.trees.mask_tokens import MaskTokens
from infer.trees.token_graph import Drafts, TokenGraph
from infer.trees.tree import Tree

#: N-gram probabilities by token, then the text's own counts, one mapping per n-gram length.
Known = Sequence[Mapping[int, float]]
#: Scores by token, their total, and the n-gram statistics.
Scores = tuple[dict[int, float], float, Known]
#: Weights by token id, in descending order.
Answer = dict[int, float]
#: Likeliest tokens read from each adaptive token's distribution; n-grams choose among them.
ANSWERS = 16
#: Largest exponent of a probability; larger ones underflow at temperatures near 0.
MAX_POWER = 24.0
#: Compute the noise of this many likeliest successors; it seldom lifts a less likely one.
NOISY = 6


class Places(DraftGraph):
    """The candidates that follow a text; its last token is the root of the next draft.

    Each place has at most `width` candidates, from the adaptive tokens' `answers` and
    from n-grams. `graph` holds the candidates computed so far.
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
        # By node: the place of its children; the answer that it was a candidate of, empty without
        # answers, and the n-gram statistics at its place.
        self._places = [0]
        self._answered: list[Answer] = [{}]
        self._known: list[Known] = [()]
        # By place and the token before it: the answers, corrected by the token.
        self._corrected: dict[tuple[int, int], Answer] = {}
        # By place and the tokens before it: the scores by n-grams.
        self._by_tail: dict[tuple[int, tuple[int, ...]], Scores] = {}

    def answering(self, count: int) -> "Places":
        """See DraftGraph."""
        answers = self._answers
        if answers:
            ids, weights = answers.ids[:count], answers.weights[:count]
            answers = replace(answers, ids=ids, weights=weights)
        places = Places(
            self._text, answers, self._ngrams, self._width, self._sampling, self._seed
        )
        places._corrected = self._corrected  # on a GPU each correction waits for it
        places._by_tail = self._by_tail
        return places

    def expand(self, node: int) -> None:
        """Add the candidates for the next place under a node."""
        place = self._places[node]
        answer = self._answer(node) if place < self.answered else {}
        scores, total = answer, 1.0
        known: Known = ({},)
        if self._ngrams is not None:
            if not node:
                # Updated here, not in every step: a plain step needs no n-grams.
                self._ngrams.extend(self._text)
            else:
                tail = self._tails[self.graph.parents[node]]
                self._tails[node] = (*tail, self.graph.tokens[node])[-LONGEST:]
            scores, total, known = self._by_ngrams(self._ngrams, node)
            if answer:
                λ = self._ngrams.weights.place(place) / (1 + self._sampling.temperature)
                scores = mixture(answer, scores, λ, total)
                total = 1.0
        ranked = sorted(scores, key=scores.__getitem__, reverse=True)
        for token in ranked[: self._width]:
            self.graph.add(node, token, scores[token] / total)
            self._answered.append(answer)
            self._known.append(known)
            self._places.append(place + 1)

    def tree(self, drafts: Drafts) -> Tree:
        """See DraftGraph: the tree with the source of each draft."""
        sources = tuple(map(self.source, drafts.nodes))
        return replace(super().tree(drafts), sources=sources)

    def kind(self, node: int) -> int:
        """See DraftGraph: 0 without an answer for the place, else 1.

        With an answer, 1 is added for its likeliest token, and 2 for a token that n-grams predict.
        """
        answer = self._answered[node]
        if not answer:
            return 0
        token = self.graph.tokens[node]
        chances, *_ = self._known[node]
        return 1 + (token == next(iter(answer))) + 2 * (token in chances)

    def source(self, node: int) -> str:
        """Return the source of a node, "" for the root.

        It is "adaptive" for the likeliest answer and for answers that no n-gram predicts,
        "text" for other tokens that the text's n-grams have counted, "ngrams" for the rest.
        """
        if not node:
            return ""
        token = self.graph.tokens[node]
        answer = self._answered[node]
        chances, *counted = self._known[node]
        if token in answer and (token == next(iter(answer)) or token not in chances):
            return "adaptive"
        return "text" if any(token in counts for counts in counted) else "ngrams"

    def _answer(self, node: int) -> Answer:
        """Return the answer for the place under a node, by descending weight."""
        answers = self._answers
        assert answers is not None
        place = self._places[node]
        ids = answers.ids[place]
        if answers.correct is None:
            return dict(zip(ids, answers.weights[place]))
        token = self.graph.tokens[node]
        if (place, token) not in self._corrected:
            scores = answers.correct(place, token, ids)
            if temperature := self._sampling.temperature:
                scores = [
                    score / temperature + noise(self._seed, self._position + place, id)
                    for score, id in zip(scores, ids)
                ]
            if not all(map(isfinite, scores)):  # the head overflows
                return dict(zip(ids, answers.weights[place]))
            largest = max(scores)
            shares = {id: exp(score - largest) for score, id in zip(scores, ids)}
            total = sum(shares.values())
            order = sorted(ids, key=shares.__getitem__, reverse=True)
            self._corrected[place, token] = {id: shares[id] / total for id in order}
        return self._corrected[place, token]

    def _by_ngrams(self, ngrams: TextNgrams, node: int) -> Scores:
        place = self._places[node], self._tails[node]
        if place not in self._by_tail:
            self._by_tail[place] = self._scores(ngrams, *place)
        return self._by_tail[place]

    def _scores(self, ngrams: TextNgrams, place: int, tail: tuple[int, ...]) -> Scores:
        chances, D, counted = ngrams.successors(tail)
        known: Known = (chances, *counted)
        if not self._sampling.temperature:
            return chances, 1 / D, known
        position = self._position + place
        power = min(1 / self._sampling.temperature, MAX_POWER)
        likeliest = sorted(chances, key=chances.__getitem__, reverse=True)[:NOISY]
        rest = max(0.0, 1 - D * sum(chances[token] for token in likeliest)) ** power
        chances = {
            token: (D * chances[token]) ** power
            * exp(noise(self._seed, position, token))
            for token in likeliest
        }
        return chances, rest + sum(chances.values()), known


def mixture(
    answer: Answer, by_ngrams: dict[int, float], λ: float, total: float
) -> dict[int, float]:
    """Return (1 - λ) times the answer's weights plus λ times the shares of the n-grams' `total`."""
    scores = {id: (1 - λ) * share for id, share in answer.items()}
    for token, score in by_ngrams.items():
        scores[token] = scores.get(token, 0.0) + λ * score / total
    return scores


@dataclass(slots=True)
class Drafted:
    """The inputs of the next drafts of one sequence: its n-grams, and the answers of adaptive tokens."""

    seed: int
    ngrams: TextNgrams | None
    answers: Candidates | None = None


class CandidateSource(Source):
    """Draft from adaptive tokens and n-grams.

    An empty `mask` turns the adaptive tokens off, `ngrams=None` the n-grams. A node has up
    to `k` probes under it, a place at most `width` candidates.
    """

    def __init__(
        self,
        mask: MaskTokens,
        k: int,
        *,
        width: int = 1,
        ngrams: Ngrams | None = None,
    ) -> None:
        if mask:
            mask.check(k)
        self._mask = mask
        self.width = max(width, ANSWERS) if ngrams else width
        self._candidates = width
        self._ngrams = ngrams
        self._sampling = GREEDY
        self._sequences: list[Drafted] = []

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See Source. The requests' seeds determine the noise of their draws."""
        self._sampling = sampling
        self._sequences = [
            Drafted(request.seed, TextNgrams(self._ngrams) if self._ngrams else None)
            for request in requests
        ]

    def begin(
        self, contexts: Sequence[Sequence[int]], depths: Sequence[int]
    ) -> list[Places | None]:
        """See Source."""
        return [
            self._places(b, context, self._sequences[b].answers) if depth else None
            for b, (context, depth) in enumerate(zip(contexts, depths))
        ]

    def dry_run(self, b: int, context: Sequence[int]) -> Places | None:
        """See Source: drafts by n-grams, which need no forward."""
        return self._places(b, context, None) if self._ngrams else None

    def probes(self, b: int, count: int, length: int) -> tuple[int, ...]:
        """See Source."""
        if not self._mask:
            return ()
        seed = self._sequences[b].seed
        return self._mask.row(count, seed=seed, length=length)

    def keep(self, b: int, drafts: Drafts | None, result: Verified) -> None:
        """See Source: the answers after the accepted path."""
        self._sequences[b].answers = result.answers

    def drop(self, b: int) -> None:
        """See Source."""
        self._sequences[b] = self._sequences[-1]
        self._sequences.pop()

    def _places(
        self, b: int, context: Sequence[int], answers: Candidates | None
    ) -> Places:
        sequence = self._sequences[b]
        return Places(
            context,
            answers,
            sequence.ngrams,
            self._candidates,
            self._sampling,
            sequence.seed,
        )
