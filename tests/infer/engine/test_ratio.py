"""Verification by ratio, node by node, over whole probability spaces: all candidates that may be
drawn, in all orders, by their probability.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from infer.engine.pick import conditional_distribution, draw

Row = list[Fraction]


def norm(row: Row) -> Row:
    return [x / sum(row) for x in row] if sum(row) else row


def without(q: Row, c: int) -> Row:
    return norm([Fraction(0) if token == c else x for token, x in enumerate(q)])


def literal(r: Row, q: Row, candidates: Sequence[int]) -> Row:
    """The law of the token after a node, word for word, in exact numbers."""
    if not candidates:
        return r
    c, *others = candidates
    accepted = min(Fraction(1), r[c] / q[c])
    rest = literal(
        norm([max(a - b, Fraction(0)) for a, b in zip(r, q)]), without(q, c), others
    )
    return [
        (accepted if token == c else 0) + (1 - accepted) * x
        for token, x in enumerate(rest)
    ]


def orders(q: Row, k: int) -> list[tuple[tuple[int, ...], Fraction]]:
    """Every outcome of k draws without replacement, and its probability; shorter where q runs out."""
    support = [token for token, x in enumerate(q) if x]
    result = []
    for ids in permutations(support, min(k, len(support))):
        left, chance = q, Fraction(1)
        for c in ids:
            left, chance = without(left, c), chance * left[c]
        result.append((ids, chance))
    return result


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Row, Row, int]:
    """p, q and k: skewed, with holes, equal now and then, k beyond the tokens too."""
    V = draw(st.integers(1, 5))
    weights = st.lists(
        st.sampled_from([0, 0, 1, 2, 5, 40, 1000]), min_size=V, max_size=V
    ).filter(any)
    p = draw(weights)
    q = draw(st.one_of(weights, st.just(p)))
    return (
        norm([Fraction(x) for x in p]),
        norm([Fraction(x) for x in q]),
        draw(st.integers(1, 6)),
    )


def tensor(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)


@settings(max_examples=60)
@given(pairs())
def test_over_all_draws_the_token_is_the_targets(pair: tuple[Row, Row, int]) -> None:
    """In exact numbers exactly; and `conditional_distribution` is the literal one, to 1e-12."""
    p, q, k = pair
    space = orders(q, k)
    laws = [literal(p, q, ids) for ids, _ in space]
    assert [
        sum(w * row[token] for (_, w), row in zip(space, laws))
        for token in range(len(p))
    ] == p
    ids = torch.tensor([[*ids, *[-1] * (k - len(ids))] for ids, _ in space])
    n = len(space)
    result = conditional_distribution(
        tensor([p]).expand(n, -1), tensor([q]).expand(n, -1), ids
    )
    torch.testing.assert_close(result, tensor(laws), rtol=0, atol=1e-12)
    weights = torch.tensor([float(w) for _, w in space], dtype=torch.float64)
    torch.testing.assert_close(weights @ result, tensor([p])[0], rtol=0, atol=1e-12)


def test_a_distribution_that_was_drawn_dry_or_is_the_targets_leaves_nothing_undefined() -> (
    None
):
    p = torch.tensor(
        [[0.2, 0.3, 0.5], [0.0, 0.0, 1.0], [0.25, 0.75, 0.0]], dtype=torch.float64
    )
    q = torch.tensor(
        [[0.2, 0.3, 0.5], [0.5, 0.5, 0.0], [0.75, 0.25, 0.0]], dtype=torch.float64
    )
    result = conditional_distribution(
        p, q, torch.tensor([[2, 0, 1], [1, 0, -1], [0, 1, -1]])
    )
    expected = torch.tensor(
        [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1 / 3, 2 / 3, 0.0]], dtype=torch.float64
    )
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "q",
    [[0.6, 0.3, 0.1], [0.0, 0.9, 0.0, 0.1], [1.0, 0.0]],
    ids=["three", "two of four", "one"],
)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_draws_are_without_replacement_in_their_order(q: list[float], k: int) -> None:
    """Chi-square over all outcomes of 20,000 draws; what cannot be drawn never is."""
    n = 20_000
    rows = draw(
        torch.tensor([q], dtype=torch.float64).expand(n, -1),
        k,
        torch.Generator().manual_seed(k),
    )
    assert rows.shape == (n, k)
    space = orders([Fraction(x).limit_denominator(100) for x in q], k)
    counts = [
        int((rows == torch.tensor([*ids, *[-1] * (k - len(ids))])).all(1).sum())
        for ids, _ in space
    ]
    assert sum(counts) == n
    assert (
        len(space) == 1
        or stats.chisquare(counts, [n * float(w) for _, w in space]).pvalue > 0.001
    )
