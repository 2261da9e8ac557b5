"""What measurements say beyond this run: intervals of speedups, scores and differences, of 95 %. Pure."""

from collections.abc import Sequence
from statistics import mean, median

import numpy as np
from scipy.stats import binomtest, bootstrap

LEVEL = 0.95
RESAMPLES = 2000
Interval = tuple[float, float]
Pair = tuple[
    float, float
]  # seconds of plain decoding, and the ratio of tokens per second to it


def speedup(pairs_by_prompt: Sequence[Sequence[Pair]]) -> tuple[float, Interval | None]:
    """Return the speedup over plain decoding on a set of prompts, and its interval over the prompts.

    With t_p the median seconds of plain decoding on prompt p and r_p the median ratio of its pairs,

        speedup = sum_p t_p / sum_p (t_p / r_p)

    is the time of plain decoding over that of the decoder, for the same tokens on the whole set: long texts
    count for more, as they do for who waits. The interval says what another draw of such prompts would give;
    there is none for a single prompt.
    """
    t = np.array([median(seconds for seconds, _ in pairs) for pairs in pairs_by_prompt])
    r = np.array([median(ratio for _, ratio in pairs) for pairs in pairs_by_prompt])
    value = float(t.sum() / (t / r).sum())
    if len(t) < 2:
        return value, None
    return value, _percentiles(
        (t, t / r), lambda a, b, axis: a.sum(axis=axis) / b.sum(axis=axis)
    )


def share(passed: int, all_: int) -> Interval:
    """Return the interval of a share (Wilson 1927): sound at 0 and 1 too."""
    interval = binomtest(passed, all_).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def average(values: Sequence[float]) -> Interval | None:
    """Return the interval of a mean over problems; None for a single one."""
    return _percentiles((np.array(values),), np.mean) if len(values) > 1 else None


def difference(
    ours: Sequence[float], theirs: Sequence[float]
) -> tuple[float, Interval | None]:
    """Return the difference of two means on the same problems, and its interval, by pairs."""
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    return mean(gaps), average(gaps)


def _percentiles(samples: tuple[np.ndarray, ...], statistic: object) -> Interval:
    result = bootstrap(
        samples,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
