"""Lay out sequences for the training objectives, as pure functions.

M = H(Y, A) is Y with the tokens in windows replaced by adaptive ids
(data_prep/windows.py).

Shape legend: b sequences of n tokens; the model's input has r rows and c columns, the
first n columns are the trunk. `labels` is already shifted: labels[i] is the token that
column i predicts. The loss of every objective is the same weighted sum of
cross-entropies, so objectives differ only in their layout.

    documents          0  0  0  1  1  -      (- is padding)
    Y                  a  b  c  D  e  ·
    labels of Y        b  c  ×  e  ×  ×      (× is IGNORE: no prediction across documents)
    offsets            0  1  2  0  0  0      (b and c are replaced)
    M                  a  A  A  D  e  ·
    labels of M        ×  c  ×  ×  ×  ×      (only adaptive positions, M_mask of eq. 9)

`branch` leaves Y unchanged and appends the adaptive tokens of each window as additional
columns. They attend to the clean prefix of their window and to the window's earlier tokens:

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

A column with offset j at position t attends to the first t - j + 1 columns of the trunk,
the j - 1 columns before it and itself: the mask follows from offsets and positions
(train/attention.py).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.windows import replace

IGNORE = -100
# Branch columns are padded to a multiple of this, so that allocators see fewer shapes.
COLUMNS = 16


@dataclass(frozen=True)
class Layout:
    """The input of one forward pass.

    ids, labels, offsets, positions, teachers: (r, c) int64; weights: (r, c) float32.
    The loss is Σ weights · cross-entropy over all columns with a label other than IGNORE.
    offsets is j for the adaptive token a_j and 0 for a standard token. teachers is, for
    a_j, the index in the flattened input of the standard token that predicts the same
    label from the clean prefix; -1 elsewhere. trunk is n.
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
    """Return the layout of f(Ŷ, Y), eq. 7: every standard token predicts the next."""
    return _trunk(tokens, next_tokens(tokens, documents), np.zeros_like(tokens))


def basic(
    tokens: np.ndarray,
    documents: np.ndarray,
    offsets: np.ndarray,
    adaptive: Sequence[int],
) -> Layout:
    """Return the layout of the paper's baseline, f(M̂, Y_M) of eq. 8 (SDSAT App. A).

    M is the sequence Y with the tokens in windows replaced by adaptive ids. Every token of M
    predicts the next token of Y.
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
    """Return the layout of ½ ( f(Ŷ, Y) + w f(M̂, Y_M) ⊙ M_mask ), eq. 9.

    Rows 0..b-1 are Y, rows b..2b-1 are M. The masked term is divided by the number of
    tokens as in eq. 7, or with masked_mean="masked" by the number of masked positions; in
    training, by the number in the whole step (share_masked_mean in train/data.py).
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
    """Return the layout of eq. 9 with Y computed once and a clean prefix for every
    window.

    `windows` are the starts and widths of each sequence's windows. A window ends before
    the first position that is not `free` (b, n) bool, and before the first without a
    label. Rows are padded to a common width with columns that have no label and attend
    only to the first token. The padded width of the windows is a multiple of `multiple`
    and never 0: without a window the loss of a gated adapter would have no gradient.
    `standard` (b,) are factors of the rows' standard terms; with factor 0 the trunk only
    serves as the teacher.
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
    """Return the layout with the window tokens replaced by `noise` (r, c).

    `noise` is unused where offsets is 0 (objective.mask=noise).

        offsets    0  0  0  0 │ 1  2  │ 1
        ids        a  b  c  d │ A  A  │ A
        noise      q  r  s  t │ u  v  │ w
        result     a  b  c  d │ u  v  │ w
    """
    ids = np.where(layout.offsets > 0, noise, layout.ids)
    return dataclasses.replace(layout, ids=ids)


def _trunk(ids: np.ndarray, labels: np.ndarray, offsets: np.ndarray) -> Layout:
    """Return a layout without branches; its loss is the mean over all tokens."""
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
    """Return the positions and offsets of the tokens of all windows, in order."""
    n = len(usable)
    index = np.where(usable, n, np.arange(n))
    # end[i] is the first unusable position from i on.
    end = np.minimum.accumulate(index[::-1])[::-1]
    widths = np.minimum(widths, end[starts] - starts)
    offsets = (
        np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths) + 1
    )
    return np.repeat(starts, widths) + offsets - 1, offsets


def _join(standard: Layout, masked: Layout, *, axis: int) -> Layout:
    """Concatenate the two terms of eq. 9 as rows or as columns, each with weight 1/2."""
    names = ("ids", "labels", "offsets", "positions", "teachers", "weights")
    joined = {
        name: np.concatenate([getattr(standard, name), getattr(masked, name)], axis)
        for name in names
    }
    return Layout(**joined | {"weights": joined["weights"] / 2}, trunk=standard.trunk)
