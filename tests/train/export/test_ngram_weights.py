"""Weights of n-grams, fitted to planted windows."""

import numpy as np
import pytest

from infer.drafters.places import Places
from infer.engine.output import Candidates
from infer.ngrams import Ngrams, NgramTable, NgramWeights, TextNgrams
from tests.infer.ngram_tables import make_table
from train.export.ngram_weights import (
    PLACES,
    accepted_drafts,
    count,
    expected,
    find_hits,
    fit_ngrams,
)
from train.export.verify import Window

V = 12
L = 3
PLANTED = NgramWeights(0.25, 4.0, (1.4,))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> NgramTable:
    """Return the table of a random text in which some tokens follow others often."""
    rng = np.random.default_rng(0)
    text = [0]
    for _ in range(3000):
        text.append(int(text[-1] * 5 + rng.integers(4)) % V)
    path = tmp_path_factory.mktemp("tables") / "table"
    return make_table(path, [text], order=3, vocabulary=V)


def plant(
    table: NgramTable | None, weights: NgramWeights, *, wrong: float, windows: int = 40
) -> list[Window]:
    """Return windows of 24 texts that continue with the drafts of these weights.

    A share `wrong` continues at random.
    """
    rng = np.random.default_rng(1)
    ngrams = Ngrams(table, V, weights=weights)
    planted: list[Window] = []
    for sequence in range(24):
        document = rng.integers(0, V, 5).tolist()
        text = TextNgrams(ngrams)
        for _ in range(windows):
            root = len(document) - 1
            before = list(document)
            text.extend(before)
            shares = np.sort(rng.dirichlet(np.ones(5), L))[:, ::-1].tolist()
            ids = [rng.permutation(V)[:5].tolist() for _ in range(L)]
            places = Places(before, Candidates(ids, shares), text, 1)
            choices = places.grow([0.0] * L, depth=L).tokens[1:]
            if rng.random() < wrong:
                choices = rng.integers(0, V, L).tolist()
            document += [*choices, *rng.integers(0, V, 2).tolist()]
            planted.append(Window(sequence, document, root, choices, ids, shares))
    return planted


@pytest.mark.parametrize(
    ("weights", "has_table"),
    [
        (PLANTED, True),
        (NgramWeights(2.0, 0.25, (1.4,)), False),
    ],
)
def test_a_planted_optimum_is_recovered(
    table: NgramTable, weights: NgramWeights, has_table: bool
) -> None:
    used = table if has_table else None
    windows = plant(used, weights, wrong=0.0)
    fit = fit_ngrams(windows, used, V)
    assert (fit.weights.table, fit.weights.text) == (weights.table, weights.text)
    assert fit.weights.places == tuple(weights.place(j) for j in range(L))
    assert fit.accepted["all"] == L > 1.9 * fit.accepted["adaptive"]


def test_the_fit_drafts_as_decoding_does(table: NgramTable) -> None:
    """Every pair of weights and every λ, against the drafter itself."""
    windows = plant(table, NgramWeights(), wrong=0.5, windows=4)
    pairs = [NgramWeights(), NgramWeights(0.5, 4.0)]
    hits, known = find_hits(windows, Ngrams(table, V), pairs)
    sequences = np.zeros(len(windows), dtype=int)
    for p, pair in enumerate(pairs):
        for i, λ in enumerate(PLACES):
            ngrams = Ngrams(table, V, weights=NgramWeights(pair.table, pair.text, (λ,)))
            counts = count(hits[p, i], known, sequences).sum(1)
            assert expected(counts) == accepted_drafts(windows, ngrams)


def test_defaults_stay_without_a_gain_beyond_noise(table: NgramTable) -> None:
    """For noise, and for a single sequence."""
    noise = plant(table, NgramWeights(), wrong=1.0)
    assert fit_ngrams(noise, table, V).weights == NgramWeights()
    single = [w for w in plant(table, PLANTED, wrong=0.0) if not w.sequence]
    assert fit_ngrams(single, table, V).weights == NgramWeights()
