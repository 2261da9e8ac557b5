import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.objective.layout import COLUMNS, IGNORE, basic, branch, causal, dual, next_tokens, replaceable

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
    assert layout.ids is TOKENS and layout.trunk == 6
    assert layout.weights.sum() == pytest.approx(1)


def test_basic_is_equation_8() -> None:
    layout = basic(TOKENS, DOCUMENTS, OFFSETS, [A])
    assert layout.ids.tolist() == [[11, A, A, 1, 15, 0]]
    assert layout.labels.tolist() == [[12, 13, X, 15, X, X]]
    assert layout.offsets.tolist() == OFFSETS.tolist()
    assert layout.weights == pytest.approx(np.full((1, 6), 1 / 6))


def test_dual_is_equation_9_row_by_row() -> None:
    layout = dual(TOKENS, DOCUMENTS, OFFSETS, [A], w=2.0)
    assert layout.ids.tolist() == [[11, 12, 13, 1, 15, 0], [11, A, A, 1, 15, 0]]
    assert layout.labels.tolist() == [[12, 13, X, 15, X, X], [X, 13, X, X, X, X]]
    assert layout.offsets.tolist() == [[0] * 6, [0, 1, 2, 0, 0, 0]]
    assert layout.teachers.tolist() == [[-1] * 6, [-1, 1, 2, -1, -1, -1]]
    assert layout.weights[0] == pytest.approx(np.full(6, 1 / 12))
    assert layout.weights[1] == pytest.approx(np.full(6, 2 / 12))


def test_the_masked_term_may_be_a_mean_over_masked_positions() -> None:
    layout = dual(TOKENS, DOCUMENTS, OFFSETS, [A], masked_mean="masked")
    kept = layout.labels[1] != IGNORE
    assert layout.weights[1][kept].sum() == pytest.approx(0.5)
    nothing = dual(TOKENS, DOCUMENTS, np.zeros_like(OFFSETS), [A], masked_mean="masked")
    assert np.isfinite(nothing.weights).all()


def test_branch_is_the_docstrings_picture() -> None:
    tokens = np.array([[11, 12, 13, 14, 15]])
    documents = np.zeros_like(tokens)
    windows = [(np.array([1, 3]), np.array([2, 1]))]
    free = replaceable(tokens, documents, [])
    layout = branch(tokens, documents, windows, free, [A], w=2.0)
    assert layout.trunk == 5 and layout.ids.shape == (1, 5 + COLUMNS)
    shown = slice(0, 8)
    assert layout.ids[0, shown].tolist() == [11, 12, 13, 14, 15, A, A, A]
    assert layout.positions[0, shown].tolist() == [0, 1, 2, 3, 4, 1, 2, 3]
    assert layout.labels[0, shown].tolist() == [12, 13, 14, 15, X, 13, 14, 15]
    assert layout.offsets[0, shown].tolist() == [0, 0, 0, 0, 0, 1, 2, 1]
    assert layout.teachers[0, shown].tolist() == [-1] * 5 + [1, 2, 3]
    assert (layout.labels[0, 8:] == X).all() and (layout.offsets[0, 8:] == 0).all()
    assert layout.weights[0, 0] == pytest.approx(1 / 10) and layout.weights[0, 5] == pytest.approx(2 / 10)


def test_a_window_wider_than_L_is_one_branch_on_its_clean_prefix() -> None:
    """The worked row of objective.wide_share: L = 1, a window of width 1 and a wide one of width 3."""
    tokens = np.array([[11, 12, 13, 14, 15]])
    free = replaceable(tokens, np.zeros_like(tokens), [])
    layout = branch(tokens, np.zeros_like(tokens), [(np.array([1, 1]), np.array([1, 3]))], free, [A])
    row = slice(5, 9)
    assert layout.ids[0, row].tolist() == [A, A, A, A]
    assert layout.positions[0, row].tolist() == [1, 1, 2, 3]
    assert layout.offsets[0, row].tolist() == [1, 1, 2, 3]
    assert layout.labels[0, row].tolist() == [13, 13, 14, 15]
    with pytest.raises(ValueError, match="offset 3 has no adaptive id: there are 2"):
        branch(tokens, np.zeros_like(tokens), [(np.array([1]), np.array([3]))], free, [A, A + 1])


@given(st.integers(0, 10**6), st.booleans())
def test_branches_are_whole_windows_of_their_document(seed: int, diverse: bool) -> None:
    """Every window's columns run a_1, a_2, ... from its start, stop before control tokens, padding
    and ends of documents, and predict what the clean token at their position predicts.
    """
    generator = np.random.default_rng(seed)
    b, n, L, control = 2, 24, 4, [5]
    tokens = generator.integers(0, 12, size=(b, n))
    documents = np.sort(generator.integers(-1, 3, size=(b, n)), axis=1)
    documents[documents < 0] = 3
    documents[:, n - int(generator.integers(0, 4)) :] = -1
    free = replaceable(tokens, documents, control)
    starts = [np.flatnonzero(generator.random(n) < 0.3) for _ in range(b)]
    windows = [(s, generator.integers(1, L + 1, size=len(s))) for s in starts]
    ids = [90, 91, 92, 93] if diverse else [90]
    layout = branch(tokens, documents, windows, free, ids)
    labels = next_tokens(tokens, documents)
    for row, (starts_m, widths_m) in enumerate(windows):
        wanted = []
        for start, width in zip(starts_m, widths_m, strict=True):
            for j, t in enumerate(range(start, min(n, start + width)), start=1):
                if not free[row, t] or labels[row, t] == X:
                    break
                wanted.append(
                    (ids[j - 1] if diverse else 90, t, j, labels[row, t], row * layout.ids.shape[1] + t)
                )
        columns = zip(
            *(
                x[row, n:]
                for x in (layout.ids, layout.positions, layout.offsets, layout.labels, layout.teachers)
            ),
            strict=True,
        )
        assert [tuple(map(int, column)) for column in columns][: len(wanted)] == [
            tuple(map(int, w)) for w in wanted
        ]
        assert (layout.offsets[row, n + len(wanted) :] == 0).all()
        assert (layout.labels[row, n + len(wanted) :] == X).all()
