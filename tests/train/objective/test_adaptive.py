import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.objective.adaptive import replace, retain, sample_windows, widen, window_offsets


def reference_offsets(starts: list[int], widths: list[int], replaceable: list[bool]) -> list[int]:
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
def test_offsets_equal_the_reference(replaceable: list[bool], data: st.DataObject) -> None:
    n = len(replaceable)
    starts = sorted(data.draw(st.sets(st.integers(0, n - 1))))
    widths = data.draw(st.lists(st.integers(1, 7), min_size=len(starts), max_size=len(starts)))
    found = window_offsets(np.array(starts, int), np.array(widths, int), np.array(replaceable))
    assert found.tolist() == reference_offsets(starts, widths, replaceable)


def test_the_worked_example() -> None:
    starts, widths = np.array([2, 6]), np.array([2, 1])
    offsets = window_offsets(starts, widths, np.ones(8, bool))
    assert offsets.tolist() == [0, 0, 1, 2, 0, 0, 1, 0]
    tokens = np.arange(11, 19)
    assert replace(tokens, offsets, [99]).tolist() == [11, 12, 99, 99, 15, 16, 99, 18]
    assert replace(tokens, offsets, [91, 92]).tolist() == [11, 12, 91, 92, 15, 16, 91, 18]
    with pytest.raises(ValueError, match="offset 3 has no adaptive id"):
        replace(tokens, np.array([0, 1, 2, 3, 0, 0, 0, 0]), [91, 92])


def test_windows_follow_the_papers_process() -> None:
    """Binomial(n, 0.1) starts, widths uniform on 1..L."""
    n, L = 200_000, 5
    starts, widths = sample_windows(n, L=L, start_rate=0.1, generator=np.random.default_rng(0))
    assert abs(len(starts) - 0.1 * n) < 3.3 * np.sqrt(n * 0.1 * 0.9)
    for width in range(1, L + 1):
        expected = len(starts) / L
        assert abs((widths == width).sum() - expected) < 3.5 * np.sqrt(expected)
    # A position stays standard when none of the L positions up to it starts a window that reaches it.
    covered = (window_offsets(starts, widths, np.ones(n, bool)) > 0).mean()
    free = np.prod([1 - 0.1 * (L - d) / L for d in range(L)])
    assert covered == pytest.approx(1 - free, abs=0.005)


def test_a_far_token_stays_with_its_probability_and_never_alone() -> None:
    generator = np.random.default_rng(0)
    widths = np.full(100_000, 6)
    kept = retain(widths, rate=0.7, floor=0.2, generator=generator)
    shares = [(kept >= j).mean() for j in range(1, 7)]
    assert np.allclose(shares, [0.7, 0.49, 0.343, 0.2401, 0.2, 0.2], atol=0.005)
    assert (retain(np.array([3, 1]), rate=1.0, floor=0.0, generator=generator) == [3, 1]).all()
    assert len(retain(np.array([], int), rate=0.7, floor=0.2, generator=generator)) == 0


def test_a_share_of_the_windows_is_wider_than_L() -> None:
    """`branch` never trained an offset above L, where the paper decodes with k = 13 after L = 7."""
    narrow = np.random.default_rng(0).integers(1, 6, size=100_000)
    widths = widen(narrow, L=5, L_max=8, share=0.25, generator=np.random.default_rng(1))
    shares = [(widths == width).mean() for width in range(1, 9)]
    assert np.allclose(shares, [0.15] * 5 + [0.25 / 3] * 3, atol=0.005)
    assert (widths[widths <= 5] == narrow[widths <= 5]).all()
