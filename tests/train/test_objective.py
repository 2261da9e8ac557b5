import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.windows import (
    replaceable,
    sample_windows,
    window_offsets,
)
from train.objective import IGNORE, basic, branch, dual, next_tokens

X = IGNORE
A = 99
TOKENS = np.array([[11, 12, 13, 1, 15, 0]])
DOCUMENTS = np.array([[0, 0, 0, 1, 1, -1]])
OFFSETS = np.array([[0, 1, 2, 0, 0, 0]])


def test_control_tokens_padding_and_first_tokens_are_never_replaced() -> None:
    assert replaceable(TOKENS, DOCUMENTS, [12]).tolist() == [
        [False, False, True, False, True, False]
    ]


def test_basic_is_equation_8() -> None:
    layout = basic(TOKENS, DOCUMENTS, OFFSETS, [A])
    assert layout.ids.tolist() == [[11, A, A, 1, 15, 0]]
    assert layout.labels.tolist() == [[12, 13, X, 15, X, X]]
    assert layout.weights == pytest.approx(np.full((1, 6), 1 / 6))


def test_dual_is_equation_9_row_by_row() -> None:
    layout = dual(TOKENS, DOCUMENTS, OFFSETS, [A], w=2.0)
    assert layout.ids.tolist() == [[11, 12, 13, 1, 15, 0], [11, A, A, 1, 15, 0]]
    assert layout.labels.tolist() == [[12, 13, X, 15, X, X], [X, 13, X, X, X, X]]
    assert layout.teachers.tolist() == [[-1] * 6, [-1, 1, 2, -1, -1, -1]]
    assert layout.weights[0] == pytest.approx(np.full(6, 1 / 12))
    assert layout.weights[1] == pytest.approx(np.full(6, 2 / 12))


def test_branch_is_as_drawn_in_its_docstring() -> None:
    tokens = np.array([[11, 12, 13, 14, 15]])
    documents = np.zeros_like(tokens)
    windows = [(np.array([1, 3]), np.array([2, 1]))]
    free = replaceable(tokens, documents, [])
    layout = branch(tokens, documents, windows, free, [A], w=2.0)
    assert layout.trunk == 5
    assert layout.ids[0, :8].tolist() == [11, 12, 13, 14, 15, A, A, A]
    assert layout.positions[0, :8].tolist() == [0, 1, 2, 3, 4, 1, 2, 3]
    assert layout.labels[0, :8].tolist() == [12, 13, 14, 15, X, 13, 14, 15]
    assert layout.offsets[0, :8].tolist() == [0, 0, 0, 0, 0, 1, 2, 1]
    assert layout.weights[0, [0, 5]] == pytest.approx([1 / 10, 2 / 10])


@given(st.integers(0, 10**6), st.booleans())
def test_branches_are_windows_within_their_document(seed: int, diverse: bool) -> None:
    """A window's columns are a_1, a_2, ... from its start.

    They stop before control tokens, padding and ends of documents. Each predicts the same
    token as the clean token at its position. With one adaptive id windows may be wider
    than L.
    """
    generator = np.random.default_rng(seed)
    n = 24
    tokens = generator.integers(0, 12, size=(2, n))
    documents = np.sort(generator.integers(0, 4, size=(2, n)), axis=1)
    documents[:, n - int(generator.integers(0, 4)) :] = -1
    free = replaceable(tokens, documents, [5])
    ids = [90, 91, 92, 93] if diverse else [90]
    starts = [np.flatnonzero(generator.random(n) < 0.3) for _ in range(2)]
    widest = 4 if diverse else 9
    widths = [generator.integers(1, widest + 1, size=len(row)) for row in starts]
    layout = branch(tokens, documents, list(zip(starts, widths)), free, ids)
    labels = next_tokens(tokens, documents)
    fields = (layout.ids, layout.positions, layout.offsets, layout.labels)
    for row in range(2):
        expected = []
        for start, width in zip(starts[row], widths[row]):
            for t in range(start, min(n, start + width)):
                if not free[row, t] or labels[row, t] == X:
                    break
                id = ids[(t - start) % len(ids)]
                teacher = row * layout.ids.shape[1] + t
                expected.append([id, t, t - start + 1, labels[row, t], teacher])
        end = n + len(expected)
        columns = [field[row, n:end] for field in (*fields, layout.teachers)]
        assert np.transpose(columns).tolist() == expected
        assert (layout.offsets[row, end:] == 0).all()
        assert (layout.labels[row, end:] == X).all()


def reference_offsets(
    starts: list[int], widths: list[int], replaceable: list[bool]
) -> list[int]:
    """Compute offsets slowly: mark covered positions, then count along each run."""
    windows = [range(start, start + width) for start, width in zip(starts, widths)]
    offsets: list[int] = []
    for position, free in enumerate(replaceable):
        covered = free and any(position in window for window in windows)
        offsets.append((offsets[-1] if offsets else 0) + 1 if covered else 0)
    return offsets


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_offsets_equal_the_reference(
    replaceable: list[bool], data: st.DataObject
) -> None:
    n = len(replaceable)
    starts = sorted(data.draw(st.sets(st.integers(0, n - 1))))
    widths = data.draw(
        st.lists(st.integers(1, 7), min_size=len(starts), max_size=len(starts))
    )
    result = window_offsets(
        np.array(starts, int), np.array(widths, int), np.array(replaceable)
    )
    assert result.tolist() == reference_offsets(starts, widths, replaceable)


def test_windows_follow_the_papers_process() -> None:
    """The number of starts is Binomial(n, 0.1); widths are uniform on 1..L."""
    n, L = 200_000, 5
    starts, widths = sample_windows(
        n, L=L, start_rate=0.1, generator=np.random.default_rng(0)
    )
    assert abs(len(starts) - 0.1 * n) < 3.3 * np.sqrt(n * 0.1 * 0.9)
    expected = len(starts) / L
    counts = np.bincount(widths, minlength=L + 1)[1:]
    assert (np.abs(counts - expected) < 3.5 * np.sqrt(expected)).all()
