"""Rows in groups; 95 % intervals of speedups and scores over a set's prompts or problems. Pure."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from scipy.stats import binomtest, bootstrap

LEVEL = 0.95
RESAMPLES = 2000
Interval = tuple[float, float]
Row = Mapping[str, Any]
# Seconds of plain decoding, and the ratio of the tokens per second to plain decoding's.
Pair = tuple[float, float]


def speedup(pairs_by_prompt: Sequence[Sequence[Pair]]) -> tuple[float, Interval | None]:
    """Return the speedup over plain decoding on a set of prompts, and its interval.

    With t_p the median seconds of plain decoding on prompt p and r_p the median ratio of its
    pairs,

        speedup = sum_p t_p / sum_p (t_p / r_p)

    is the time of plain decoding over that of the decoder for the whole set. The interval is
    over draws of prompts, with a prompt's two times together; None for a single prompt.
    """
    t = np.array([median(seconds for seconds, _ in pairs) for pairs in pairs_by_prompt])
    r = np.array([median(ratio for _, ratio in pairs) for pairs in pairs_by_prompt])

    value = float(t.sum() / (t / r).sum())
    if len(t) < 2:
        return value, None

    def ratio_of_sums(plain: Any, drafted: Any, axis: int) -> Any:
        return plain.sum(axis=axis) / drafted.sum(axis=axis)

    result = bootstrap(
        (t, t / r),
        ratio_of_sums,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = result.confidence_interval
    return value, (float(low), float(high))


def grouped(
    rows: Sequence[Row], *names: str
) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Return rows by the values of these columns, in their order."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.items())


def share(passed: int, total: int) -> Interval | None:
    """Return Wilson's interval of a share, which is sound at 0 and 1 too; None of nothing."""
    if not total:
        return None
    interval = binomtest(passed, total).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)
