"""Medians, spread and intervals of pairs, against the same word for word."""

import random
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.speed import statistics
from infer.speed.statistics import Weighed, estimate, interval, whole

MEASURED = st.lists(
    st.lists(st.builds(Weighed, st.floats(0.1, 10), st.floats(0.2, 5)), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


@given(MEASURED)
def test_the_whole_is_the_ratio_of_the_sets_times(prompts: list[list[Weighed]]) -> None:
    """sum t / sum (t / r): plain decoding's time over that of the decoder for the same tokens."""
    plain = [median(item.weight for item in rounds) for rounds in prompts]
    ours = [seconds / median(item.value for item in rounds) for seconds, rounds in zip(plain, prompts)]
    assert whole(prompts) == pytest.approx(sum(plain) / sum(ours))


def slowly(prompts: list[list[Weighed]], times: int) -> np.ndarray:
    generator = random.Random(1)
    result = []
    for _ in range(times):
        resample = []
        for _ in prompts:
            rounds = generator.choice(prompts)
            resample.append([generator.choice(rounds) for _ in rounds])
        result.append(whole(resample))
    return np.percentile(result, (2.5, 97.5))


@settings(max_examples=8)
@given(MEASURED.filter(lambda prompts: sum(map(len, prompts)) > 1))
def test_the_interval_is_the_bootstraps(prompts: list[list[Weighed]]) -> None:
    """Prompts drawn with replacement, and of each its rounds: prompts with fewer rounds too."""
    values = [item.value for rounds in prompts for item in rounds]
    spread = max(values) - min(values)
    result, expected = interval(prompts), slowly(prompts, 2000)
    assert result == pytest.approx(expected, abs=0.2 * spread)


def test_the_interval_covers_what_is_measured_again() -> None:
    """Normal noise of 5 % on 20 prompts in 3 rounds: about 95 of 100 intervals hold the truth."""
    generator = np.random.default_rng(0)
    held = 0
    for seed in range(100):
        prompts = [[Weighed(1.0, value) for value in row] for row in generator.normal(2, 0.1, (20, 3))]
        low, high = interval(prompts, seed=seed)
        held += low <= 2 <= high
    assert 90 <= held <= 100


def test_chunks_change_nothing_but_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[Weighed(1 + p, 1 + 0.1 * r + 0.05 * p) for r in range(3)] for p in range(6)]
    whole_at_once = interval(prompts)
    monkeypatch.setattr(statistics, "CHUNK", 300)
    assert interval(prompts) == pytest.approx(whole_at_once, rel=0.02)


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
    assert result.interval == (interval and pytest.approx(interval, abs=0.2))
    assert estimate([]) is estimate([[]]) is None


def test_an_outlier_in_one_round_of_three_changes_nothing() -> None:
    calm = [[Weighed(1.0, 2.0)] * 3 for _ in range(4)]
    wild = [[Weighed(1.0, 2.0), Weighed(30.0, 0.1), Weighed(1.0, 2.0)], *calm[1:]]
    assert whole(wild) == whole(calm) == 2.0
