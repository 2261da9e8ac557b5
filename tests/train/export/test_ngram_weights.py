"""Weights of n-grams, fitted to planted windows."""

import numpy as np
import pytest

from infer.drafters.places import Places
from infer.engine.output import Candidates
from infer.ngrams import Ngrams, NgramTable, NgramWeights, TextNgrams
from tests.infer.ngram_tables import make_table
from train.export.ngram_weights import (
    PLACES,
    _hits,
    accepted_drafts,
    count,
    expected,
    fit_ngrams,
)
from train.export.verify import Window, choose_windows

V, L = 12, 3


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> NgramTable:
    """Of random texts, in which some tokens follow others more often."""
    rng = np.random.default_rng(0)
    texts = [[0]]
    for _ in range(3000):
        texts[0].append(int(texts[0][-1] * 5 + rng.integers(4)) % V)
    return make_table(
        tmp_path_factory.mktemp("tables") / "table", texts, order=3, vocabulary=V
    )


def plant(
    table: NgramTable | None, weights: NgramWeights, *, wrong: float, windows: int = 40
) -> list[Window]:
    """Return windows of 24 texts that continue with the drafts of these weights, a share `wrong` at random."""
    rng, planted, ngrams = (
        np.random.default_rng(1),
        list[Window](),
        Ngrams(table, V, weights=weights),
    )
    for sequence in range(24):
        document, text = rng.integers(0, V, 5).tolist(), TextNgrams(ngrams)
        for _ in range(windows):
            root, text_before = len(document) - 1, list(document)
            text.extend(text_before)
            shares = np.sort(rng.dirichlet(np.ones(5), L))[:, ::-1].tolist()
            ids = [rng.permutation(V)[:5].tolist() for _ in range(L)]
            places = Places(text_before, Candidates(ids, shares), text, 1)
            choices = places.grow([0.0] * L, depth=L).tokens[1:]
            if rng.random() < wrong:
                choices = rng.integers(0, V, L).tolist()
            document += [*choices, *rng.integers(0, V, 2).tolist()]
            planted.append(Window(sequence, document, root, choices, ids, shares))
    return planted


@pytest.mark.parametrize(
    ("weights", "tabled"),
    [
        (NgramWeights(0.25, 4.0, (1.4,)), True),
        (NgramWeights(4.0, 0.25, (0.1, 1.4, 0.3)), True),
        (NgramWeights(2.0, 0.25, (1.4,)), False),
    ],
)
def test_a_planted_optimum_is_recovered(
    table: NgramTable, weights: NgramWeights, tabled: bool
) -> None:
    windows = plant(table if tabled else None, weights, wrong=0.0)
    fit = fit_ngrams(windows, table if tabled else None, V)
    assert fit.weights == weights and (fit.L, fit.windows) == (L, len(windows))
    assert fit.accepted["all"] == L > 1.9 * fit.accepted["adaptive"]


def test_the_fit_drafts_as_decoding_does(table: NgramTable) -> None:
    """Every pair of weights and every λ, against the drafter itself."""
    windows = plant(table, NgramWeights(), wrong=0.5, windows=4)
    pairs = [NgramWeights(), NgramWeights(0.5, 4.0)]
    hits, known = _hits(windows, Ngrams(table, V), pairs)
    for p, pair in enumerate(pairs):
        for i, λ in enumerate(PLACES):
            ngrams = Ngrams(table, V, weights=NgramWeights(pair.table, pair.text, (λ,)))
            counts = count(hits[p, i], known, np.zeros(len(windows), dtype=int)).sum(1)
            assert expected(counts) == accepted_drafts(windows, ngrams)


def test_defaults_stay_without_a_gain_beyond_noise(table: NgramTable) -> None:
    """For noise, for a single sequence, and where n-grams propose nothing."""
    assert (
        fit_ngrams(plant(table, NgramWeights(), wrong=1.0), table, V).weights
        == NgramWeights()
    )
    alone = [
        w
        for w in plant(table, NgramWeights(0.25, 4.0, (1.4,)), wrong=0.0)
        if not w.sequence
    ]
    assert fit_ngrams(alone, table, V).weights == NgramWeights()
    silent = [
        Window(s, [*range(9)], 0, [1, 2], [[1, 5], [3, 2]], [[0.6, 0.4]] * 2)
        for s in range(4)
    ]
    fit = fit_ngrams(silent, None, V)
    assert fit.weights == NgramWeights() and fit.accepted == {
        "adaptive": 1.0,
        "ngrams": 0.0,
        "all": 1.0,
    }


def test_windows_that_end_early_count_as_far_as_they_go() -> None:
    """Three windows have a place 0, and two are right. Of these one has a place 1; it is right and ends."""
    hits = np.array([[1, 1, 0], [1, 0, 0], [0, 1, 1]], dtype=bool)
    known = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=bool)
    counts = count(hits, known, np.array([0, 0, 3]))
    assert counts.tolist() == [[[2, 1, 0], [1, 0, 0]], [[2, 1, 0], [0, 0, 0]]]
    assert expected(counts.sum(1)) == pytest.approx(2 / 3 + 2 / 3 * 1)


def test_windows_of_a_layout() -> None:
    offsets, positions = (
        np.array([0, 0, 0, 1, 2, 1, 1, 2, 3, 0]),
        np.array([0, 1, 2, 1, 2, 0, 2, 3, 4, 0]),
    )

    def chosen(most: int) -> list[tuple[int, list[int]]]:
        return [
            (root, columns.tolist())
            for root, columns in choose_windows(offsets, positions, most=most)
        ]

    assert chosen(9) == [(1, [3, 4]), (0, [5]), (2, [6, 7, 8])]
    assert chosen(2) == [(1, [3, 4]), (0, [5])]
    assert choose_windows(np.zeros(4, int), np.arange(4), most=2) == []
