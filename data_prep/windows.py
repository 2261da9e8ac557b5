"""Draw windows of adaptive tokens over packed sequences. Pure functions.

This is the paper's "Poisson-style" process (SDSAT §2.2, eq. 4). Each position independently
starts a window with probability `start_rate`; the window's width is uniform on 1..L.
M = H(Y, A) is Y with the covered positions replaced by adaptive tokens. The offset j of a
covered position is its distance from the last standard token, because a_j has this distance
in decoding:

    Y        y1 y2 y3 y4 y5 y6 y7 y8
    covered   0  0  1  1  0  0  1  0
    offsets   0  0  1  2  0  0  1  0
    M        y1 y2 a1 a2 y5 y6 a1 y8

Windows that overlap or touch form one longer run, as in the paper. train.inspect shows examples.
"""

from collections.abc import Sequence

import numpy as np


def sample_windows(
    n: int, *, L: int, start_rate: float, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw windows over n positions; return (m,) ascending starts and (m,) widths in 1..L."""
    starts = np.flatnonzero(generator.random(n) < start_rate)
    return starts, generator.integers(1, L + 1, size=len(starts))


def window_offsets(
    starts: np.ndarray, widths: np.ndarray, replaceable: np.ndarray
) -> np.ndarray:
    """Return (n,) offsets: 0 for a standard token, j for the j-th adaptive token of a run.

    `replaceable` (n,) bool is True for tokens that may be replaced.
    """
    n = len(replaceable)
    ends = np.minimum(starts + widths, n)
    edges = np.bincount(starts, minlength=n + 1) - np.bincount(ends, minlength=n + 1)
    covered = (np.cumsum(edges[:n]) > 0) & replaceable
    index = np.arange(n)
    last_standard = np.maximum.accumulate(np.where(covered, -1, index))
    return np.where(covered, index - last_standard, 0)


def replace(
    tokens: np.ndarray, offsets: np.ndarray, adaptive: Sequence[int]
) -> np.ndarray:
    """Return M = H(Y, A), the (n,) tokens with a_j at offset j.

    A single adaptive id is used for every offset (identical tokens); several ids are
    a_1, a_2, ... (diverse tokens). Raises ValueError for an offset beyond the diverse ids.
    """
    ids = np.asarray(adaptive)
    if len(ids) == 1:
        return np.where(offsets > 0, ids[0], tokens)
    if offsets.max(initial=0) > len(ids):
        raise ValueError(
            f"offset {offsets.max()} must be at most {len(ids)}, the number of adaptive ids"
        )
    mixed: np.ndarray = np.where(offsets > 0, ids[offsets - 1], tokens)
    return mixed


def replaceable(
    tokens: np.ndarray, documents: np.ndarray, control: Sequence[int]
) -> np.ndarray:
    """Return (b, n) bool, False for padding, control tokens and the first token of a document."""
    first = np.ones_like(documents, dtype=bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    inside: np.ndarray = (documents >= 0) & ~first & ~np.isin(tokens, list(control))
    return inside
