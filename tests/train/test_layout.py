import numpy as np
import pytest

from train.layout import IGNORE, causal, dual, next_tokens, replaceable

X = IGNORE
A = 99
TOKENS = np.array([[11, 12, 13, 1, 15, 0]])
DOCUMENTS = np.array([[0, 0, 0, 1, 1, -1]])
OFFSETS = np.array([[0, 1, 2, 0, 0, 0]])


def test_labels_never_cross_a_documents_end() -> None:
    assert next_tokens(TOKENS, DOCUMENTS).tolist() == [[12, 13, X, 15, X, X]]


def test_control_tokens_padding_and_first_tokens_are_never_replaced() -> None:
    documents = np.array([[0, 0, 0, 1, 1, -1]])
    assert replaceable(TOKENS, documents, [12]).tolist() == [[False, False, True, False, True, False]]


def test_causal_is_the_mean_over_n() -> None:
    layout = causal(TOKENS, DOCUMENTS)
    assert layout.ids is TOKENS
    assert layout.weights.sum() == pytest.approx(1)


def test_dual_is_equation_9_row_by_row() -> None:
    layout = dual(TOKENS, DOCUMENTS, OFFSETS, [A], w=2.0)
    assert layout.ids.tolist() == [[11, 12, 13, 1, 15, 0], [11, A, A, 1, 15, 0]]
    assert layout.labels.tolist() == [[12, 13, X, 15, X, X], [X, 13, X, X, X, X]]
    assert layout.offsets.tolist() == [[0] * 6, [0, 1, 2, 0, 0, 0]]
    assert layout.weights[0] == pytest.approx(np.full(6, 1 / 12))
    assert layout.weights[1] == pytest.approx(np.full(6, 2 / 12))


def test_the_masked_term_may_be_a_mean_over_masked_positions() -> None:
    layout = dual(TOKENS, DOCUMENTS, OFFSETS, [A], masked_mean="masked")
    kept = layout.labels[1] != IGNORE
    assert layout.weights[1][kept].sum() == pytest.approx(0.5)
    nothing = dual(TOKENS, DOCUMENTS, np.zeros_like(OFFSETS), [A], masked_mean="masked")
    assert np.isfinite(nothing.weights).all()
