import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.windows import (
    replaceable,
    sample_windows,
    widen,
    window_offsets,
)
from train.objective import COLUMNS, IGNORE, basic, branch, dual, next_tokens

X = IGNORE
A = 99
TOKENS = np.array([[11, 12, 13, 1, 15, 0]])
DOCUMENTS = np.array([[0, 0, 0, 1, 1, -1]])
OFFSETS = np.array([[0, 1, 2, 0, 0, 0]])


def test_control_tokens_padding_and_first_tokens_are_never_replaced() -> None:
    documents = np.array([[0, 0, 0, 1, 1, -1]])
    assert replaceable(TOKENS, documents, [12]).tolist() == [
        [False, False, True, False, True, False]
    ]


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


def test_branch_is_the_docstrings_picture() -> None:
    tokens = np.array([[11, 12, 13, 14, 15]])
    documents = np.zeros_like(tokens)
    windows = [(np.array([1, 3]), np.array([2, 1]))]
    free = replaceable(tokens, documents, [])
    layout = branch(tokens, documents, windows, free, [A], w=2.0)
    assert layout.trunk == 5 and layout.ids.shape == (1, 5 + COLUMNS)
    printed = slice(0, 8)
    assert layout.ids[0, printed].tolist() == [11, 12, 13, 14, 15, A, A, A]
    assert layout.positions[0, printed].tolist() == [0, 1, 2, 3, 4, 1, 2, 3]
    assert layout.labels[0, printed].tolist() == [12, 13, 14, 15, X, 13, 14, 15]
    assert layout.offsets[0, printed].tolist() == [0, 0, 0, 0, 0, 1, 2, 1]
    assert layout.teachers[0, printed].tolist() == [-1] * 5 + [1, 2, 3]
    assert (layout.labels[0, 8:] == X).all() and (layout.offsets[0, 8:] == 0).all()
    assert layout.weights[0, 0] == pytest.approx(1 / 10) and layout.weights[
        0, 5
    ] == pytest.approx(2 / 10)


def test_a_window_wider_than_L_is_one_branch_on_its_clean_prefix() -> None:
    """The worked row of objective.wide_share: L = 1, a window of width 1 and a wide one
    of width 3.
    """
    tokens = np.array([[11, 12, 13, 14, 15]])
    free = replaceable(tokens, np.zeros_like(tokens), [])
    layout = branch(
        tokens, np.zeros_like(tokens), [(np.array([1, 1]), np.array([1, 3]))], free, [A]
    )
    row = slice(5, 9)
    assert layout.ids[0, row].tolist() == [A, A, A, A]
    assert layout.positions[0, row].tolist() == [1, 1, 2, 3]
    assert layout.offsets[0, row].tolist() == [1, 1, 2, 3]
    assert layout.labels[0, row].tolist() == [13, 13, 14, 15]
    with pytest.raises(ValueError, match="offset 3 has no adaptive id: there are 2"):
        branch(
            tokens,
            np.zeros_like(tokens),
            [(np.array([1]), np.array([3]))],
            free,
            [A, A + 1],
        )


@given(st.integers(0, 10**6), st.booleans())
def test_branches_are_whole_windows_of_their_document(seed: int, diverse: bool) -> None:
    """Every window's columns run a_1, a_2, ... from its start, stop before control
    tokens, padding and ends of documents, and predict what the clean token at their
    position predicts.
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
        target = []
        for start, width in zip(starts_m, widths_m, strict=True):
            for j, t in enumerate(range(start, min(n, start + width)), start=1):
                if not free[row, t] or labels[row, t] == X:
                    break
                target.append(
                    (
                        ids[j - 1] if diverse else 90,
                        t,
                        j,
                        labels[row, t],
                        row * layout.ids.shape[1] + t,
                    )
                )
        columns = zip(
            *(
                x[row, n:]
                for x in (
                    layout.ids,
                    layout.positions,
                    layout.offsets,
                    layout.labels,
                    layout.teachers,
                )
            ),
            strict=True,
        )
        assert [tuple(map(int, column)) for column in columns][: len(target)] == [
            tuple(map(int, w)) for w in target
        ]
        assert (layout.offsets[row, n + len(target) :] == 0).all()
        assert (layout.labels[row, n + len(target) :] == X).all()


def reference_offsets(
    starts: list[int], widths: list[int], replaceable: list[bool]
) -> list[int]:
    """The slow, obvious version: cover, then count along each run."""
    n = len(replaceable)
    covered = [False] * n
    for start, width in zip(starts, widths):
        for position in range(start, min(start + width, n)):
            covered[position] = replaceable[position]
    offsets = [0] * n
    for position in range(n):
        if covered[position]:
            offsets[position] = 1 + (offsets[position - 1] if position else 0)
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
    """Binomial(n, 0.1) starts, widths uniform on 1..L."""
    n, L = 200_000, 5
    starts, widths = sample_windows(
        n, L=L, start_rate=0.1, generator=np.random.default_rng(0)
    )
    assert abs(len(starts) - 0.1 * n) < 3.3 * np.sqrt(n * 0.1 * 0.9)
    for width in range(1, L + 1):
        expected = len(starts) / L
        assert abs((widths == width).sum() - expected) < 3.5 * np.sqrt(expected)
    # A position stays standard when none of the L positions up to it starts a window
    # that reaches it.
    covered = (window_offsets(starts, widths, np.ones(n, bool)) > 0).mean()
    free = np.prod([1 - 0.1 * (L - d) / L for d in range(L)])
    assert covered == pytest.approx(1 - free, abs=0.005)


def test_a_share_of_the_windows_is_wider_than_L() -> None:
    """`branch` never trained an offset above L, where the paper decodes with k = 13
    after L = 7.
    """
    narrow = np.random.default_rng(0).integers(1, 6, size=100_000)
    widths = widen(narrow, L=5, L_max=8, share=0.25, generator=np.random.default_rng(1))
    shares = [(widths == width).mean() for width in range(1, 9)]
    assert np.allclose(shares, [0.15] * 5 + [0.25 / 3] * 3, atol=0.005)
    assert (widths[widths <= 5] == narrow[widths <= 5]).all()
