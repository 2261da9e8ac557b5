"""pass@k, intervals and differences, against their definitions."""

from itertools import combinations
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from infer.quality.result import bootstrap, difference, pass_at_k, wilson


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_with_one_that_passes(
    passed: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(passed)))
    by_definition = mean(any(chosen) for chosen in combinations(passed, k))
    assert pass_at_k([passed, [True] * k], k) == pytest.approx([by_definition, 1])


def test_intervals_cover_what_they_say() -> None:
    """95 % of samples of 60 problems, of which pass@k is anything between 0 and 1, within what 200 can tell."""
    expected = binomtest(55, 164).proportion_ci(method="wilson")
    assert wilson(55, 164) == pytest.approx((expected.low, expected.high), abs=1e-12)
    generator = np.random.default_rng(1)
    intervals = [bootstrap(generator.beta(0.5, 1, size=60).tolist()) for _ in range(200)]
    assert 180 <= sum(low <= 1 / 3 <= high for low, high in intervals) <= 199


def test_a_difference_is_by_pairs() -> None:
    """Models that fail the same problems differ by less than two of the same scores that do not. Models that
    agree on few problems may differ: a bootstrap would say that they are certainly equal.
    """
    ours, theirs = [1.0] * 40 + [0.0] * 60, [1.0] * 38 + [0.0] * 62
    gap, (low, high) = difference(ours, theirs)
    apart, (far_low, far_high) = difference(ours, theirs[::-1])
    assert gap == apart == pytest.approx(0.02)
    assert high - low < 0.09 < 0.2 < far_high - far_low and low < gap < high
    gap, (low, high) = difference([0.0] * 5, [0.0] * 5)
    assert gap == 0 and low == -high and high > 0.3
    assert difference([0.25, 0.5], [0.25, 0.5]) == (0, (0, 0))
