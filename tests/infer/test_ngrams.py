"""Test n-grams as a source of drafts against dense vectors."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.drafters.candidates import Places
from infer.engine.noise import gumbel
from infer.engine.output import Candidates
from infer.engine.sampling import Sampling
from infer.ngrams import (
    LONGEST,
    TEXT_CONTEXTS,
    Ngrams,
    NgramWeights,
    TextNgrams,
)
from infer.trees.token_graph import unroll
from tests.infer.ngram_tables import (
    count_ngrams,
    make_table,
    save,
    slow_successors,
)

V, ORDER = 6, 4
TEXTS = st.lists(st.integers(0, V - 1), min_size=1, max_size=40)
DATA = st.lists(
    st.lists(st.integers(0, V - 1), min_size=ORDER, max_size=30), max_size=3
)
WEIGHTS = st.builds(
    NgramWeights,
    st.floats(0.1, 9),
    st.floats(0.1, 9),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
)


def ngrams_of(
    data: list[list[int]], weights: NgramWeights, *, text: bool = True
) -> Ngrams:
    if not data:
        return Ngrams(None, V, text=text, weights=weights)
    with TemporaryDirectory() as folder:
        table = make_table(Path(folder) / "table", data, order=ORDER, vocabulary=V)
    return Ngrams(table, V, text=text, weights=weights)


def dense(ngrams: TextNgrams, tail: list[int]) -> np.ndarray:
    """Return p_ngram (V,) from the sparse shares."""
    shares, D, _ = ngrams.successors(tail)
    return D * np.array(
        [shares.get(token, ngrams.unigrams[token]) for token in range(V)]
    )


@given(DATA, TEXTS, st.booleans(), WEIGHTS, TEXTS)
def test_sparse_successors_are_the_interpolation_of_dense_vectors(
    data, text, counted, weights, tail
) -> None:
    """Of any context, in the text or not; also twice, since successors are cached."""
    ngrams = TextNgrams(ngrams_of(data, weights, text=counted))
    ngrams.extend(text)
    for ending in (tail, text, tail):
        own = text if counted else []
        slow = slow_successors(data, own, ending, ORDER, V, weights, TEXT_CONTEXTS)
        assert dense(ngrams, ending) == pytest.approx(slow)
        assert slow.sum() == pytest.approx(1)


@given(TEXTS, st.lists(st.integers(1, 40), max_size=9))
def test_a_text_that_grows_is_counted_as_the_whole(
    text: list[int], ends: list[int]
) -> None:
    """A token at a time or hundreds, and texts shorter than any context."""
    growing, whole = (TextNgrams(Ngrams(None, V)) for _ in range(2))
    whole.extend(text)
    for end in sorted({min(end, len(text)) for end in [*ends, len(text)]}):
        growing.extend(text[:end])
    for end in range(1, len(text) + 1):
        assert growing.successors(text[:end]) == whole.successors(
            text[max(0, end - LONGEST) : end]
        )


@st.composite
def answers(draw: st.DrawFn) -> Candidates:
    """Draw the answers of up to three adaptive tokens, the likeliest first."""
    ids = []
    weights = []
    for _ in range(draw(st.integers(1, 3))):
        tokens = st.lists(st.integers(0, V - 1), min_size=1, max_size=4, unique=True)
        ids.append(draw(tokens))
        raw = sorted((draw(st.floats(0.01, 1)) for _ in ids[-1]), reverse=True)
        weights.append([share / sum(raw) for share in raw])
    return Candidates(ids, weights)


@settings(max_examples=60)
@given(
    DATA,
    TEXTS,
    answers(),
    WEIGHTS,
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 99),
    st.sampled_from([1, 2, V]),
)
def test_the_combination_is_a_mixture(
    data, text, result, weights, temperature, seed, width
) -> None:
    """The likeliest chain's places by the formulas over all tokens, with sources."""
    ngrams = TextNgrams(ngrams_of(data, weights))
    ngrams.extend(text)
    places = Places(text, result, ngrams, width, Sampling(temperature), seed)
    counts = count_ngrams([text], TEXT_CONTEXTS)
    before = list(text)
    node = 0
    for place in range(len(result.ids) + 2):
        p_V = slow_successors(data, text, before, ORDER, V, weights, TEXT_CONTEXTS)
        ids = result.ids[place] if place < len(result.ids) else []
        # Of tokens that no context has counts of only answers are candidates.
        known = sorted(ngrams.successors(before)[0])
        by_ngrams_V = np.zeros(V)
        by_ngrams_V[known] = p_V[known]
        if temperature:
            keys = torch.tensor([len(before)]), torch.tensor([seed])
            noise_V = gumbel(keys[1], keys[0], torch.arange(V)[None])[0].numpy()
            by_ngrams_V **= 1 / temperature
            rest = max(0.0, 1 - p_V[known].sum()) ** (1 / temperature)
            by_ngrams_V *= np.exp(noise_V)
            by_ngrams_V /= by_ngrams_V.sum() + rest
        score_V = by_ngrams_V
        if ids:
            share = weights.place(place) / (1 + temperature)
            score_V = share * by_ngrams_V
            score_V[ids] += (1 - share) * np.array(result.weights[place])
        places.expand(node)
        children = places.graph.children[node]
        if not children:
            break
        chosen = [places.graph.tokens[child] for child in children]
        chances = np.array([places.graph.chances[child] for child in children])
        in_text = {
            token
            for n in TEXT_CONTEXTS
            if n <= len(before)
            for token in counts.get(tuple(before[-n:]), {})
        }
        for child, token in zip(children, chosen):
            likeliest = token in ids[:1]
            if likeliest or token in in_text:
                assert places.source(child) == ("adaptive" if likeliest else "text")
        others = list({*ids, *in_text} - set(chosen))
        assert chances == pytest.approx(score_V[chosen], abs=1e-8)
        assert (np.diff(chances) <= 0).all() and len(chosen) <= width
        assert (score_V[others] <= score_V[chosen[-1]] + 1e-9).all()
        node = children[0]
        before = [*before, chosen[0]]


@settings(max_examples=50)
@given(
    st.floats(-30, 0.5), st.integers(1, 2000), st.booleans(), st.sampled_from([0, 0.4])
)
def test_scores_at_any_temperature_stay_numbers(
    power: float, repeats: int, answered: bool, second: float
) -> None:
    """Regression: probabilities to the power of 1 / T were 0 or raised OverflowError."""
    result = Candidates([[9, 8]], [[1.0 - second, second]]) if answered else None
    ngrams = TextNgrams(Ngrams(None, 50_000))
    sampling = Sampling(10**power)
    places = Places([5, 6, 7] * repeats, result, ngrams, 4, sampling, seed=3)
    unroll(places.graph, [0.0] * 40, depth=4, expand=places.expand)
    assert all(0 <= chance <= 1 for chance in places.graph.chances[1:])


RIGHT: dict[str, list[int]] = {
    "unigrams": [1, 1, 1, 1],
    "keys_2": [5, 9],
    "totals_2": [2, 3],
    "first_2": [0, 1, 3],
    "ids_2": [3, 0, 2],
    "counts_2": [2, 2, 1],
}
WRONG: dict[str, dict[str, list[int] | None]] = {
    "an id that is not in the table": {"ids_2": [3, 0, 4]},
    "fewer unigrams than ids": {"unigrams": [1, 1, 1]},
    "no unigrams": {"unigrams": None},
    "0 unigrams": {"unigrams": [], "ids_2": [], "counts_2": [], "first_2": [0, 0, 0]},
    "no ids": {"ids_2": None},
    "fewer ids than counts": {"ids_2": [3, 0]},
    "fewer totals than keys": {"totals_2": [2]},
    "fewer spans than keys": {"first_2": [0, 3]},
    "no spans": {"first_2": []},
    "a span beyond the file": {"first_2": [0, 1, 4]},
    "a span that begins beyond the file": {"first_2": [0, 4000, 3]},
    "a first span that begins later": {"first_2": [1, 2, 3]},
    "an array of another order": {"keys_3": [1]},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_table_with_a_right_checksum_and_wrong_content_is_refused(
    name: str, tmp_path: Path
) -> None:
    """Regression: such a table raised KeyError, IndexError or ZeroDivisionError in the middle of a text."""
    path = tmp_path / "table"
    save(path, RIGHT, order=2, vocabulary=4)
    changed = {**RIGHT, **WRONG[name]}
    tensors = {key: value for key, value in changed.items() if value is not None}
    with pytest.raises(ValueError, match="must be an n-gram table"):
        save(path, tensors, order=2, vocabulary=4)
