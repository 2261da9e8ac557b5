"""Metrics of a sample of sequences, and when they differ from the validation's."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import t

from conf import UserError
from train.export.verify import HeldOutFigures, check_acceptance, summarise_clusters
from train.loss import summarise


def test_the_interval_is_that_of_the_means_of_sequences() -> None:
    """With as many positions in every sequence: positions of one depend on each other."""
    generator = torch.Generator().manual_seed(0)
    correct = torch.randint(0, 100, (12,), generator=generator).double()
    tallies = torch.zeros(12, 2, 4, dtype=torch.float64)
    tallies[:, 0, 0], tallies[:, 0, 2] = 100, correct
    measured = summarise_clusters(tallies)
    assert measured.sequences == 12 and measured.means == summarise(tallies.sum(0))
    low, high = measured.intervals["accuracy_0"]
    shares = correct / 100
    half = t.ppf(0.975, 11) * float(shares.std()) / math.sqrt(12)
    assert (low, high) == pytest.approx(
        (float(shares.mean()) - half, float(shares.mean()) + half), rel=1e-3
    )


def measured_of(**changed: Any) -> HeldOutFigures:
    intervals = {"standard_loss": (1.0, 2.0), "accepted": (0.9, 1.1)}
    means = {"standard_loss": 1.5, "accepted": 1.0, "masked": 9.0}
    return replace(
        HeldOutFigures(8, means, intervals, {"standard_loss": 0.01, "accepted": 0.02}),
        **changed,
    )


def test_on_all_sequences_only_rounding_may_differ() -> None:
    """The mean's interval was allowed, 13 % of the demo's acceptance: rope_theta times 1.5 was published."""
    measured = measured_of()
    check_acceptance(measured, {"standard_loss": 1.509, "accepted": 0.981}, every=8)
    with pytest.raises(
        UserError,
        match=r"accepted must be 1.0300 .*, within 0.0200, got 1.0000 on 8 of its 8",
    ):
        check_acceptance(measured, {"standard_loss": 1.5, "accepted": 1.03}, every=8)
    with pytest.raises(UserError, match="standard_loss must be nan"):
        check_acceptance(
            measured, {"standard_loss": math.nan, "accepted": 1.0}, every=8
        )


def test_on_some_sequences_chance_is_allowed() -> None:
    measured = measured_of()
    check_acceptance(measured, {"standard_loss": 1.9, "accepted": 1.1}, every=80)
    with pytest.raises(UserError, match="accepted must be 1.2000"):
        check_acceptance(measured, {"standard_loss": 1.5, "accepted": 1.2}, every=80)
    with pytest.raises(
        UserError, match="accepted must be 1.1000"
    ):  # of 8 of 9 little is unknown
        check_acceptance(measured, {"standard_loss": 1.5, "accepted": 1.1}, every=9)


def test_one_sequence_has_no_intervals() -> None:
    """It was always refused: the width of an infinite interval is NaN."""
    tallies = torch.tensor(
        [[[100.0, 150.0, 40.0, 40.0], [50.0, 200.0, 10.0, 10.0]]], dtype=torch.float64
    )
    measured = summarise_clusters(tallies)
    assert (
        measured.intervals == {}
        and measured.roundings.keys() == measured.means.keys() - {"masked"}
    )
    check_acceptance(measured, measured.means, every=1)
