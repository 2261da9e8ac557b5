"""Weights of n-grams, fitted to planted windows."""

import numpy as np
import pytest

from infer.drafters.places import Places
from infer.engine.output import Candidates
from infer.ngrams import Ngrams, NgramTable, NgramWeights, TextNgrams
from tests.infer.ngram_tables import make_table
from train.export.ngram_weights import accepted_drafts, expected, fit_ngrams
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
    for _ in range(24):
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
            planted.append(Window(document, root, choices, ids, shares))
    return planted


@pytest.mark.parametrize("has_table", [True, False])
def test_planted_weights_are_nearly_recovered(
    table: NgramTable, has_table: bool
) -> None:
    used = table if has_table else None
    windows = plant(
        used, PLANTED if has_table else NgramWeights(2, 0.25, (1.4,)), wrong=0
    )
    fit = fit_ngrams(windows, used, V)
    default = accepted_drafts(windows, Ngrams(used, V))
    assert fit.weights.places[0] >= 0.8
    assert fit.accepted["all"] > 0.9 * L > 1.5 * fit.accepted["adaptive"]
    assert fit.accepted["all"] > default.mean()


def test_expected_drafts_of_windows_that_end_early() -> None:
    """Of 4 first places 2 are right; of the 2 windows that go on behind them, 1 is."""
    accepted = np.array([0, 0, 1, 2])
    assert expected(accepted, np.array([1, 2, 2, 2])) == 0.5 + 0.25


def test_defaults_stay_without_a_gain_beyond_noise(table: NgramTable) -> None:
    noise = plant(table, NgramWeights(), wrong=1.0)
    assert fit_ngrams(noise, table, V).weights == NgramWeights()
