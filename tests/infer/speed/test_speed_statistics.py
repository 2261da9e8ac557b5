"""Medians, spread and intervals of pairs, against the same word for word."""

import random
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.speed import statistics
from infer.speed.statistics import Weighed, estimate, interval, whole

ROUNDS = st.lists(st.builds(Weighed, st.floats(0.1, 10), st.floats(0.2, 5)), min_size=1, max_size=4)
MEASURED = st.lists(ROUNDS, min_size=1, max_size=5)


@given(MEASURED)
def test_the_whole_is_the_ratio_of_the_sets_times(prompts: list[list[Weighed]]) -> None:
    """sum t / sum (t / r): plain decoding's time over that of the decoder for the same tokens."""
    plain = [median(item.weight for item in rounds) for rounds in prompts]
    ours = [seconds / median(item.value for item in rounds) for seconds, rounds in zip(plain, prompts)]
    assert whole(prompts) == pytest.approx(sum(plain) / sum(ours))


@settings(max_examples=8)
@given(MEASURED.filter(lambda prompts: sum(map(len, prompts)) > 1))
def test_the_interval_is_the_bootstraps(prompts: list[list[Weighed]]) -> None:
    """Prompts drawn with replacement, and of each its rounds: prompts with fewer rounds too."""
    draw, resamples = random.Random(1), []
    for _ in range(2000):
        chosen = [draw.choice(prompts) for _ in prompts]
        resamples.append(whole([[draw.choice(rounds) for _ in rounds] for rounds in chosen]))
    values = [item.value for rounds in prompts for item in rounds]
    expected = np.percentile(resamples, (2.5, 97.5))
    assert interval(prompts) == pytest.approx(expected, abs=0.2 * (max(values) - min(values)))


def test_the_interval_covers_what_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Normal noise of 5 % on 20 prompts in 3 rounds: about 95 of 100 intervals hold the truth. Draws in chunks
    give the same interval.
    """
    noise, intervals = np.random.default_rng(0), []
    for seed in range(100):
        prompts = [[Weighed(1.0, value) for value in row] for row in noise.normal(2, 0.1, (20, 3))]
        intervals.append(interval(prompts, seed=seed))
    assert 90 <= sum(low <= 2 <= high for low, high in intervals) <= 100
    monkeypatch.setattr(statistics, "CHUNK", 300)
    assert interval(prompts) == pytest.approx(intervals[-1], rel=0.02)


@pytest.mark.parametrize(
    ("prompts", "value", "interval", "quartiles"),
    [
        ([[], [1.5]], 1.5, None, (1.5, 1.5)),  # one pair has no interval
        ([[1.0, 2.0, 3.0]], 2.0, (1.0, 3.0), (1.5, 2.5)),  # one prompt speaks of its rounds
        ([[1.0], [2.0], [3.0]], 3 / (1 + 1 / 2 + 1 / 3), (1.0, 3.0), (1.5, 2.5)),  # one round of its prompts
    ],
)
def test_few_measurements_have_an_estimate(prompts, value, interval, quartiles) -> None:
    result = estimate([[Weighed(1.0, value) for value in rounds] for rounds in prompts])
    assert result is not None and result.value == pytest.approx(value) and result.quartiles == quartiles
    assert (result.interval or ()) == pytest.approx(interval or (), abs=0.2)
    assert estimate([]) is estimate([[]]) is None
