"""What pairs of runs say of a decoder's speed. Pure.

With t_p the median seconds of plain decoding on prompt p, and r_p the median over rounds of the pairs' ratio
of tokens per second,

    speedup = sum_p t_p / sum_p (t_p / r_p)

is the time of plain decoding over that of the decoder, for the same number of tokens, on the whole set: long
texts count for more, as they do for who waits. Where both texts are the same, r is the ratio of their times.
Where they are not, as with a sampling peer, t_p / r_p is what plain decoding's number of tokens takes at the
peer's rate: rates are compared, and what a longer text's longer context costs is in them.

The interval is the bootstrap's, 2.5 % to 97.5 % of resamples: prompts are drawn with replacement, and of each
its rounds. It says what another draw of such prompts, timed once more on this machine, would give. Of a single
prompt it is of its rounds alone, of a single pair there is none, and of n prompts it is too narrow by about the
root of (n - 1) / n, as every such bootstrap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import harmonic_mean, median
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
LEVEL = (2.5, 97.5)  # percent
CHUNK = 2**20  # numbers drawn at once


class Weighed(NamedTuple):
    """A rate, or a ratio of rates, measured once; `weight` is the work that it is a rate of."""

    weight: float
    value: float


@dataclass(frozen=True)
class Estimate:
    """Of a set of prompts: the value, its 95 % interval, and the quartiles of single measurements."""

    value: float
    interval: tuple[float, float] | None
    quartiles: tuple[float, float]


def estimate(prompts: Sequence[Sequence[Weighed]], *, seed: int = 0) -> Estimate | None:
    """Estimate from measurements by prompt and round; None where there are none."""
    known = [rounds for rounds in prompts if rounds]
    if not known:
        return None
    values = [sample.value for rounds in known for sample in rounds]
    low, high = np.quantile(values, (0.25, 0.75)).tolist()
    return Estimate(whole(known), interval(known, seed=seed), (low, high))


def whole(prompts: Sequence[Sequence[Weighed]]) -> float:
    """Return the weighted harmonic mean of the prompts' medians."""
    weights = [median(sample.weight for sample in rounds) for rounds in prompts]
    return harmonic_mean([median(sample.value for sample in rounds) for rounds in prompts], weights)


def interval(prompts: Sequence[Sequence[Weighed]], *, seed: int = 0) -> tuple[float, float] | None:
    """Return 2.5 % and 97.5 % of `whole`, over resamples; None of one measurement."""
    counts = np.array([len(rounds) for rounds in prompts])
    if counts.sum() < 2:
        return None
    measured = np.zeros((len(prompts), counts.max(), 2))
    for index, rounds in enumerate(prompts):
        measured[index, : len(rounds)] = rounds
    generator, step = np.random.default_rng(seed), max(1, CHUNK // measured[:, :, 0].size)
    means = [
        _resampled(measured, counts, min(step, RESAMPLES - begin), generator)
        for begin in range(0, RESAMPLES, step)
    ]
    low, high = np.percentile(np.concatenate(means), LEVEL).tolist()
    return low, high


def share_intervals(right: np.ndarray, tried: np.ndarray, *, seed: int = 0) -> tuple[list[float], list[float]]:
    """Return 2.5 % and 97.5 % of sum(right) / sum(tried) at each place, over resamples of the prompts.

    Both are (prompts, places) counts; drafts of one text are no independent trials, prompts are. Empty for a
    single prompt.
    """
    if len(right) < 2 or not right.shape[1]:
        return [], []
    draws = np.random.default_rng(seed).multinomial(len(right), [1 / len(right)] * len(right), size=RESAMPLES)
    sums = draws @ tried
    shares = np.divide(draws @ right, sums, out=np.full(sums.shape, np.nan), where=sums > 0)
    low, high = np.nanpercentile(shares, LEVEL, axis=0).tolist()
    return low, high


def weighted_percentile(counts: Mapping[float, int], percent: float) -> float | None:
    """Return the least value that so many percent of all do not exceed; None of nothing."""
    need, seen = sum(counts.values()) * percent / 100, 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= need:
            return value
    return None


def _resampled(
    measured: np.ndarray, counts: np.ndarray, times: int, generator: np.random.Generator
) -> np.ndarray:
    """Return (times,) of `whole`; measured (prompts, rounds, 2), of which prompt p has counts[p]."""
    prompts = generator.integers(len(counts), size=(times, len(counts)))
    left = counts[prompts][..., None]
    rounds = (generator.random((*prompts.shape, measured.shape[1])) * left).astype(int)
    drawn = measured[prompts[..., None], rounds]
    drawn[np.arange(measured.shape[1]) >= left] = np.inf  # sorted behind those that count
    drawn.sort(axis=2)
    middle = [np.take_along_axis(drawn, at[..., None], axis=2)[:, :, 0] for at in ((left - 1) // 2, left // 2)]
    weights, values = np.moveaxis((middle[0] + middle[1]) / 2, -1, 0)
    return weights.sum(1) / (weights / values).sum(1)
