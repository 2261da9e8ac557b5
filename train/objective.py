"""Objectives as layouts of sequences, windows and adaptive ids: pure functions.

M = H(Y, A) is Y with the positions of windows replaced (data_prep/windows.py).

Shape legend: b sequences, n tokens in each, r rows of the model's input, c columns of
each; the first n are the trunk. `labels` is already shifted: labels[i] is the
token that column i predicts. The loss of every objective is the same weighted sum of
cross-entropies, so an objective is its layout.

    documents          0  0  0  1  1  -      (- is padding)
    Y                  a  b  c  D  e  ·
    labels of Y        b  c  ×  e  ×  ×      (× is IGNORE: never across a document's end)
    offsets            0  1  2  0  0  0      (b and c are replaced)
    M                  a  A  A  D  e  ·
    labels of M        ×  c  ×  ×  ×  ×      (only adaptive positions, M_mask of eq. 9)

`branch` leaves Y whole and appends each window's adaptive tokens as columns of their
own, which attend to the clean prefix of their window and to the earlier tokens of it:

    columns            a  b  c  d  e │ A1 A2 │ A1        windows of width 2 after a, 1 after c
    positions          0  1  2  3  4 │ 1  2  │ 3
    labels             b  c  d  e  × │ c  d  │ e
    offsets            0  0  0  0  0 │ 1  2  │ 1
    attends  a         1
             b         1  1
             c         1  1  1
             d         1  1  1  1
             e         1  1  1  1  1
             A1        1             │ 1
             A2        1             │ 1  1
             A1        1  1  1       │       │ 1

So a column of offset j at position t sees the t - j + 1 first columns of the trunk and
the j - 1 columns before it: the mask follows from offsets and positions
(train/attention.py).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.windows import replace

IGNORE = -100
COLUMNS = (
    16  # branch columns are padded to a multiple of it: fewer shapes for allocators
)


@dataclass(frozen=True)
class Layout:
    """The rows of one forward.

    ids, labels, offsets, positions: (r, c) int64; weights: (r, c) float32, so that loss
    = Σ weights · cross-entropy over columns whose label is not IGNORE. offsets is 0
    where a standard token predicts and j where a_j does. teachers (r, c) int64 is,
    where a_j predicts, the place in the flattened rows whose standard token predicts
    the same from the clean prefix; -1 elsewhere. trunk is n.
    """

    ids: np.ndarray
    labels: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    teachers: np.ndarray
    trunk: int


def next_tokens(tokens: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Return (b, n) labels: the next token of the same document, else IGNORE.

    `documents` (b, n) is the index of each token's document, -1 for padding.
    """
    labels = np.full_like(tokens, IGNORE)
    same = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    labels[:, :-1] = np.where(same, tokens[:, 1:], IGNORE)
    return labels


def causal(tokens: np.ndarray, documents: np.ndarray) -> Layout:
    """Return f(Ŷ, Y), eq. 7: every standard token predicts the next."""
    return _trunk(tokens, next_tokens(tokens, documents), np.zeros_like(tokens))


def basic(
    tokens: np.ndarray,
    documents: np.ndarray,
    offsets: np.ndarray,
    adaptive: Sequence[int],
) -> Layout:
    """Return f(M̂, Y_M), eq. 8: every token of M predicts the next of Y. The paper's
    baseline (App. A).
    """
    return _trunk(
        replace(tokens, offsets, adaptive), next_tokens(tokens, documents), offsets
    )


def dual(
    tokens: np.ndarray,
    documents: np.ndarray,
    offsets: np.ndarray,
    adaptive: Sequence[int],
    *,
    w: float = 1.0,
    masked_mean: str = "n",
) -> Layout:
    """Return ½ ( f(Ŷ, Y) + w f(M̂, Y_M) ⊙ M_mask ), eq. 9: rows 0..b-1 are Y, rows
    b..2b-1 are M.

    The masked term is divided by n as eq. 7 has it, or with masked_mean="masked" by the
    number of masked positions of the forward.
    """
    standard = causal(tokens, documents)
    labels = np.where(offsets > 0, standard.labels, IGNORE)
    clean = np.arange(tokens.size).reshape(tokens.shape)
    masked = Layout(
        ids=replace(tokens, offsets, adaptive),
        labels=labels,
        offsets=offsets,
        weights=_masked_weights(labels, tokens.size, w, masked_mean),
        positions=standard.positions,
        teachers=np.where(offsets > 0, clean, -1),
        trunk=standard.trunk,
    )
    return _join(standard, masked, axis=0)


def branch(
    tokens: np.ndarray,
    documents: np.ndarray,
    windows: Sequence[tuple[np.ndarray, np.ndarray]],
    free: np.ndarray,
    adaptive: Sequence[int],
    *,
    w: float = 1.0,
    masked_mean: str = "n",
    multiple: int = COLUMNS,
    standard: np.ndarray | None = None,
) -> Layout:
    """Lay out the two terms of eq. 9 with Y computed once and every window on a clean
    prefix.

    `windows` are each sequence's starts and widths; a window ends before the first
    position that is not `free` (b, n) bool, and before one that predicts nothing. Rows
    are padded to a common width, a `multiple` and not 0 (the loss of a gated adapter
    would have no gradient), with columns that predict nothing and
    see the first token alone. `standard` (b,) are factors of each row's standard term;
    with factor 0 the trunk is only a teacher.
    """
    trunk = causal(tokens, documents)
    b, n = tokens.shape
    usable = free & (trunk.labels != IGNORE)
    columns = [_columns(*window, usable[row]) for row, window in enumerate(windows)]
    widest = max(1, *(len(offsets) for _, offsets in columns))
    m = -(-widest // multiple) * multiple
    positions = np.zeros((b, m), dtype=np.int64)
    offsets = np.zeros((b, m), dtype=np.int64)
    for row, (position, offset) in enumerate(columns):
        positions[row, : len(position)] = position
        offsets[row, : len(offset)] = offset
    labels = np.where(
        offsets > 0, np.take_along_axis(trunk.labels, positions, axis=1), IGNORE
    )
    clean = np.arange(b)[:, None] * (n + m) + positions
    masked = Layout(
        ids=replace(np.take_along_axis(tokens, positions, axis=1), offsets, adaptive),
        labels=labels,
        offsets=offsets,
        weights=_masked_weights(labels, tokens.size, w, masked_mean),
        positions=positions,
        teachers=np.where(offsets > 0, clean, -1),
        trunk=n,
    )
    if standard is not None:
        factors = standard.astype(np.float32)[:, None]
        labels = np.where(factors > 0, trunk.labels, IGNORE)
        trunk = dataclasses.replace(
            trunk, labels=labels, weights=trunk.weights * factors
        )
    return _join(trunk, masked, axis=1)


def with_noise(layout: Layout, noise: np.ndarray) -> Layout:
    """Return the layout with other tokens in the rows of windows.

    `noise` (r, c) has them; its other columns are unused (objective.mask=noise).

        offsets    0  0  0  0 │ 1  2  │ 1
        ids        a  b  c  d │ A  A  │ A
        noise      q  r  s  t │ u  v  │ w
        result     a  b  c  d │ u  v  │ w
    """
    ids = np.where(layout.offsets > 0, noise, layout.ids)
    return dataclasses.replace(layout, ids=ids)


def _trunk(ids: np.ndarray, labels: np.ndarray, offsets: np.ndarray) -> Layout:
    """Return rows without branches, whose loss is the mean over all n."""
    return Layout(
        ids=ids,
        labels=labels,
        offsets=offsets,
        weights=np.full(ids.shape, 1 / ids.size, dtype=np.float32),
        positions=np.tile(np.arange(ids.shape[1]), (len(ids), 1)),
        teachers=np.full_like(ids, -1),
        trunk=ids.shape[1],
    )


def _masked_weights(
    labels: np.ndarray, n: int, w: float, masked_mean: str
) -> np.ndarray:
    count = n if masked_mean == "n" else max(1, int((labels != IGNORE).sum()))
    return np.full(labels.shape, w / count, dtype=np.float32)


def _columns(
    starts: np.ndarray, widths: np.ndarray, usable: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and offsets of all windows' tokens, one window after the other."""
    n = len(usable)
    index = np.where(usable, n, np.arange(n))
    end = np.minimum.accumulate(index[::-1])[
        ::-1
    ]  # the first unusable position from here on
    widths = np.minimum(widths, end[starts] - starts)
    offsets = (
        np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths) + 1
    )
    return np.repeat(starts, widths) + offsets - 1, offsets


def _join(standard: Layout, masked: Layout, *, axis: int) -> Layout:
    """Join the two terms of eq. 9, as rows or as columns; each weighs a half."""
    names = ("ids", "labels", "offsets", "positions", "teachers", "weights")
    joined = {
        name: np.concatenate([getattr(standard, name), getattr(masked, name)], axis)
        for name in names
    }
    return Layout(**joined | {"weights": joined["weights"] / 2}, trunk=standard.trunk)
