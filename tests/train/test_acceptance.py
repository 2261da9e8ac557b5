"""Metrics of few sequences and how sure they are."""

import math

import pytest
import torch
from scipy.stats import t

from conf import UserError
from train.export.acceptance import Measured, check_acceptance, student, summarise_clusters
from train.metrics import summarise


@pytest.mark.parametrize("freedom", [3, 7, 63])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.995])
def test_students_t_by_its_expansion(level: float, freedom: int) -> None:
    assert student(level, freedom) == pytest.approx(t.ppf((1 + level) / 2, freedom), rel=0.06)


def test_an_interval_is_that_of_the_sequences_means() -> None:
    """Where all sequences have as many positions, the mean of their means, whatever hangs together in one."""
    generator = torch.Generator().manual_seed(0)
    correct = torch.randint(0, 100, (12,), generator=generator).double()
    tallies = torch.zeros(12, 2, 4, dtype=torch.float64)
    tallies[:, 0, 0], tallies[:, 0, 2] = 100, correct
    found = summarise_clusters(tallies)
    assert found.sequences == 12 and found.means == summarise(tallies.sum(0))
    low, high = found.intervals["accuracy_0"]
    shares = correct / 100
    half = t.ppf(0.975, 11) * float(shares.std()) / math.sqrt(12)
    assert (low, high) == pytest.approx((float(shares.mean()) - half, float(shares.mean()) + half), rel=1e-3)


def test_a_metric_outside_of_what_was_measured_is_told() -> None:
    intervals = {"standard_loss": (1.0, 2.0), "accepted": (0.9, 1.1)}
    measured = Measured(8, {"standard_loss": 1.5, "accepted": 1.0, "masked": 9.0}, intervals)
    check_acceptance(measured, {"standard_loss": 1.6, "accepted": 1.1, "masked": 9.0})
    with pytest.raises(UserError, match=r"wanted accepted=1.2000 .* validation, found 1.0000 \(95 %"):
        check_acceptance(measured, {"standard_loss": 1.6, "accepted": 1.2, "masked": 9.0})
    with pytest.raises(UserError, match="wanted standard_loss=nan"):
        check_acceptance(measured, {"standard_loss": math.nan, "accepted": 1.0, "masked": 9.0})
