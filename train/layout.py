"""Objectives as layouts: (sequences, windows, adaptive ids) -> what the model sees and predicts.

Pure. Shape legend: b sequences, n tokens in each, r rows of the model's input. `labels`
is already shifted: labels[i] is the token that position i predicts. The loss of every
objective is the same weighted sum of cross-entropies, so an objective is this file alone.

    documents          0  0  0  1  1  -      (- is padding)
    Y                  a  b  c  D  e  ·
    labels of Y        b  c  ×  e  ×  ×      (× is IGNORE: never across a document's end)
    offsets            0  1  2  0  0  0      (b and c are replaced)
    M                  a  A  A  D  e  ·
    labels of M        ×  c  ×  ×  ×  ×      (only adaptive positions, M_mask of eq. 9)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from train.adaptive import replace

IGNORE = -100


@dataclass(frozen=True)
class Layout:
    """The rows of one forward.

    ids, labels, offsets: (r, n) int64; weights: (r, n) float32, so that
    loss = Σ weights · cross-entropy over positions whose label is not IGNORE.
    offsets is 0 where a standard token predicts and j where a_j does.
    """

    ids: np.ndarray
    labels: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray


def next_tokens(tokens: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """(b, n) labels: the next token of the same document, else IGNORE.

    `documents` (b, n) is the index of each token's document, -1 for padding.
    """
    labels = np.full_like(tokens, IGNORE)
    same = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    labels[:, :-1] = np.where(same, tokens[:, 1:], IGNORE)
    return labels


def replaceable(tokens: np.ndarray, documents: np.ndarray, control: Sequence[int]) -> np.ndarray:
    """(b, n) bool: neither padding, nor a control token, nor the first token of a document."""
    first = np.ones_like(documents, dtype=bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return (documents >= 0) & ~first & ~np.isin(tokens, list(control))


def causal(tokens: np.ndarray, documents: np.ndarray) -> Layout:
    """f(Ŷ, Y), eq. 7: every standard token predicts the next."""
    labels = next_tokens(tokens, documents)
    weights = np.full(tokens.shape, 1 / tokens.size, dtype=np.float32)
    return Layout(tokens, labels, np.zeros_like(tokens), weights)


def dual(
    tokens: np.ndarray,
    documents: np.ndarray,
    offsets: np.ndarray,
    adaptive: Sequence[int],
    *,
    w: float = 1.0,
    masked_mean: str = "n",
) -> Layout:
    """½ ( f(Ŷ, Y) + w f(M̂, Y_M) ⊙ M_mask ), eq. 9: rows 0..b-1 are Y, rows b..2b-1 are M.

    The masked term is divided by n as eq. 7 has it, or with masked_mean="masked" by the
    number of masked positions of the forward.
    """
    standard = causal(tokens, documents)
    labels = np.where(offsets > 0, standard.labels, IGNORE)
    count = tokens.size if masked_mean == "n" else max(1, int((labels != IGNORE).sum()))
    masked = np.full(tokens.shape, w / count, dtype=np.float32)
    return Layout(
        ids=np.concatenate([tokens, replace(tokens, offsets, adaptive)]),
        labels=np.concatenate([standard.labels, labels]),
        offsets=np.concatenate([np.zeros_like(offsets), offsets]),
        weights=np.concatenate([standard.weights, masked]) / 2,
    )
