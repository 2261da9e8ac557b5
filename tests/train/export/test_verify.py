"""When the acceptance of a written directory differs from the validation's."""

import numpy as np
import pytest
import torch
from scipy.stats import t

from conf import UserError
from train.export.verify import check_acceptance, jackknife
from train.loss import summarise


def tallies_of(sequences: int, seed: int = 0) -> torch.Tensor:
    """Return (n, 2, 4) tallies of 100 standard tokens and 50 windows of one draft each."""
    generator = torch.Generator().manual_seed(seed)
    tallies = torch.zeros(sequences, 2, 4, dtype=torch.float64)
    tallies[:, :, 0] = torch.tensor([100.0, 50.0])
    tallies[:, 0, 1] = 150
    tallies[:, 1, 1] = 100
    tallies[:, 0, 2] = 60
    right = torch.randint(0, 50, (sequences,), generator=generator).double()
    tallies[:, 1, 2] = right
    tallies[:, 1, 3] = right
    return tallies


def test_the_jackknife_of_a_mean_is_students_interval() -> None:
    values = np.random.default_rng(0).random(12)
    without = (values.sum() - values) / 11
    half = t.ppf(0.975, 11) * values.std(ddof=1) / np.sqrt(12)
    assert jackknife(without, 0.95) == pytest.approx(half)


@pytest.mark.parametrize(
    ("metric", "rounded", "wrong"),
    [
        ("standard_loss", 1.503, 1.52),
        ("masked_loss", 2.003, 2.02),
        ("accepted", 0, 0.3),
    ],
)
def test_on_all_sequences_only_rounding_may_differ(
    metric: str, rounded: float, wrong: float
) -> None:
    tallies = tallies_of(16)
    validation = {"sequences": 16, **summarise(tallies.sum(0))}
    validation[metric] = rounded or validation[metric]
    assert check_acceptance(tallies, validation) == summarise(tallies.sum(0))
    for value in (validation[metric] + wrong, float("nan")):
        with pytest.raises(
            UserError, match=f"{metric} must be .* on 16 of its 16 held"
        ):
            check_acceptance(tallies, {**validation, metric: value})


def test_on_some_sequences_chance_is_allowed() -> None:
    """A sample's mean lies within its interval of the mean of all, nearly always."""
    whole = tallies_of(200)
    validation = {"sequences": 200, **summarise(whole.sum(0))}
    for first in range(0, 200, 20):
        check_acceptance(whole[first : first + 20], validation)
    with pytest.raises(UserError, match="accepted must be"):
        check_acceptance(whole[:20], {**validation, "accepted": 0.9})
