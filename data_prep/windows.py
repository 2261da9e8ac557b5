"""Windows of span replacement over packed sequences: where adaptive tokens stand. Pure.

They are the paper's "Poisson-style" process (SDSAT §2.2, eq. 4). Every position starts a
window with probability `start_rate`, independently; its width is uniform on 1..L;
M = H(Y, A) is Y with the covered positions replaced. The offset j of a covered position is
its place in the run of adaptive tokens since the last standard token, because a_j means
that in decoding:

    Y        y1 y2 y3 y4 y5 y6 y7 y8
    covered   0  0  1  1  0  0  1  0
    offsets   0  0  1  2  0  0  1  0
    M        y1 y2 a1 a2 y5 y6 a1 y8

Windows that overlap or touch form one longer run, as in the paper. Training draws them;
data_prep.inspect shows a draw.
"""

from collections.abc import Sequence

import numpy as np


def sample_windows(
    n: int, *, L: int, start_rate: float, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw windows over n positions: `starts` (m,) ascending and `widths` (m,) in 1..L."""
    starts = np.flatnonzero(generator.random(n) < start_rate)
    return starts, generator.integers(1, L + 1, size=len(starts))


def window_offsets(
    starts: np.ndarray, widths: np.ndarray, replaceable: np.ndarray
) -> np.ndarray:
    """Return (n,) offsets: 0 for a standard position, j for the j-th adaptive token of its run.

    `replaceable` (n,) bool says where a standard token may be replaced at all.
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
    """Return M = H(Y, A): (n,) tokens with a_j at offset j.

    One adaptive id serves every offset (identical tokens); several are a_1, a_2, ...
    (diverse tokens). Raises ValueError for an offset beyond the diverse ids.
    """
    ids = np.asarray(adaptive)
    if len(ids) == 1:
        return np.where(offsets > 0, ids[0], tokens)
    if offsets.max(initial=0) > len(ids):
        raise ValueError(
            f"offset {offsets.max()} has no adaptive id: there are {len(ids)}"
        )
    mixed: np.ndarray = np.where(offsets > 0, ids[offsets - 1], tokens)
    return mixed


def replaceable(
    tokens: np.ndarray, documents: np.ndarray, control: Sequence[int]
) -> np.ndarray:
    """Return (b, n) bool: no padding, no control token, no first token of a document."""
    first = np.ones_like(documents, dtype=bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    inside: np.ndarray = (documents >= 0) & ~first & ~np.isin(tokens, list(control))
    return inside
