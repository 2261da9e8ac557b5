"""Which documents a budget takes, in proportion to their languages (SDSAT §3.1). Pure.

Every document has a bin, from a hash of the seed and its id. The bins' sizes are counted
once; a language's threshold is the bin up to which its documents fill its share. So a
document is chosen or not by its id alone, with no shuffle and no state, and the shares
are met as closely as one bin allows, whatever the sizes of single documents.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from data_prep.document import hash64

BINS = 2**14


def bin_of(seed: int, id: str) -> int:
    """The document's bin, 0 <= bin < BINS, uniform over ids."""
    return hash64(seed, "choose", id) >> 50


@dataclass
class Measure:
    """What one language has: files and bytes by bin, and tokens per byte from a sample."""

    files: np.ndarray  # (BINS,)
    bytes: np.ndarray  # (BINS,)
    sample_tokens: int = 0
    sample_bytes: int = 0

    @classmethod
    def empty(cls) -> "Measure":
        """Of nothing yet."""
        return cls(np.zeros(BINS, dtype=np.int64), np.zeros(BINS, dtype=np.int64))

    def __iadd__(self, other: "Measure") -> "Measure":
        self.files += other.files
        self.bytes += other.bytes
        self.sample_tokens += other.sample_tokens
        self.sample_bytes += other.sample_bytes
        return self


@dataclass(frozen=True)
class Chosen:
    """One language's part of the budget."""

    threshold: int  # bins below it are chosen
    share: float  # of the budget, as wanted
    files: int  # expected
    bytes: int
    exhausted: bool  # it had less than its share


def own_shares(measures: Mapping[str, Measure], by: str) -> dict[str, float]:
    """Each language's share of the data's own files or bytes."""
    sizes = {language: float(getattr(measure, by).sum()) for language, measure in measures.items()}
    total = sum(sizes.values())
    return {language: size / total for language, size in sizes.items() if size}


def choose(
    measures: Mapping[str, Measure], shares: Mapping[str, float], *, amount: float, by: str, unit: str
) -> dict[str, Chosen]:
    """Thresholds that take `amount` tokens or bytes (`unit`), `shares` of it, `by` bytes or files, each.

    `shares` of languages without data are spread over the others; a language that has less
    than its share is taken whole, and the others fill the budget. Of one whose share is 0 nothing is taken.
    """
    left_out = {name for name, share in shares.items() if name in measures and share == 0}
    known = {language: share for language, share in shares.items() if language in measures and share > 0}
    total = sum(known.values())
    wanted = {language: share / total for language, share in known.items()}
    filled = {name: _cumulated(getattr(measures[name], by)) for name in known}
    costs = {name: _cumulated(measures[name].bytes * _rate(measures, name, unit)) for name in known}

    def thresholds(scale: float) -> dict[str, int]:
        return {name: _nearest(filled[name], scale * wanted[name]) for name in known}

    def cost(scale: float) -> float:
        return sum(costs[name][threshold] for name, threshold in thresholds(scale).items())

    low, high = 0.0, max((filled[name][-1] / wanted[name] for name in known), default=0.0)
    if cost(high) > amount:
        for _ in range(64):
            middle = (low + high) / 2
            low, high = (middle, high) if cost(middle) <= amount else (low, middle)
        high = low if amount - cost(low) <= cost(high) - amount else high
    return {name: Chosen(0, 0.0, 0, 0, exhausted=False) for name in left_out} | {
        name: Chosen(
            threshold,
            wanted[name],
            int(measures[name].files[:threshold].sum()),
            int(measures[name].bytes[:threshold].sum()),
            exhausted=bool(threshold == BINS and filled[name][-1] < 0.99 * high * wanted[name]),
        )
        for name, threshold in thresholds(high).items()
    }


def _rate(measures: Mapping[str, Measure], name: str, unit: str) -> float:
    """Units per byte; a language without a sample has the rate of all."""
    if unit == "bytes":
        return 1.0
    sampled = [measures[name]] if measures[name].sample_bytes else list(measures.values())
    sample_bytes = sum(measure.sample_bytes for measure in sampled)
    return sum(measure.sample_tokens for measure in sampled) / sample_bytes if sample_bytes else 0.25


def _cumulated(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)])


def _nearest(cumulated: np.ndarray, target: float) -> int:
    """The place whose value is nearest to the target."""
    above = min(int(np.searchsorted(cumulated, target)), len(cumulated) - 1)
    below = max(above - 1, 0)
    return above if cumulated[above] - target <= target - cumulated[below] else below
