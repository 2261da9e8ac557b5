"""Test verification by ratio at one node, over all possible draws with their probabilities."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from infer.engine.pick import conditional_distribution

Row = list[Fraction]
WEIGHTS = [0, 0, 1, 2, 5, 40, 1000]


def norm(row: Row) -> Row:
    return [x / sum(row) for x in row] if sum(row) else row


def without(q: Row, c: int) -> Row:
    return norm([Fraction(0) if token == c else x for token, x in enumerate(q)])


def literal(r: Row, q: Row, candidates: Sequence[int]) -> Row:
    """Return the token's distribution as pick.py defines it, in exact numbers."""
    if not candidates:
        return r
    c, *others = candidates
    accepted = min(Fraction(1), r[c] / q[c])
    residual = norm([max(a - b, Fraction(0)) for a, b in zip(r, q)])
    rest = literal(residual, without(q, c), others)
    return [
        (accepted if token == c else 0) + (1 - accepted) * x
        for token, x in enumerate(rest)
    ]


def orders(q: Row, k: int) -> list[tuple[tuple[int, ...], Fraction]]:
    """Return every outcome of k draws without replacement, and its probability."""
    support = [token for token, x in enumerate(q) if x]
    result = []
    for ids in permutations(support, min(k, len(support))):
        left = q
        chance = Fraction(1)
        for c in ids:
            chance *= left[c]
            left = without(left, c)
        result.append((ids, chance))
    return result


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Row, Row, int]:
    """Draw p, q and k: skewed, with zeros, sometimes equal, sometimes k above the number of tokens."""
    V = draw(st.integers(1, 5))
    weights = st.lists(st.sampled_from(WEIGHTS), min_size=V, max_size=V).filter(any)
    distributions = weights.map(lambda row: norm(list(map(Fraction, row))))
    p = draw(distributions)
    return p, draw(distributions | st.just(p)), draw(st.integers(1, 6))


def tensor(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)


@settings(max_examples=60)
@given(pairs())
def test_over_all_draws_the_token_is_the_targets(pair: tuple[Row, Row, int]) -> None:
    p, q, k = pair
    space = orders(q, k)
    expected = [literal(p, q, ids) for ids, _ in space]
    for token, chance in enumerate(p):
        assert sum(w * row[token] for (_, w), row in zip(space, expected)) == chance
    ids = torch.tensor([[*ids, *[-1] * (k - len(ids))] for ids, _ in space])
    n = len(space)
    result = conditional_distribution(
        tensor([p]).expand(n, -1), tensor([q]).expand(n, -1), ids
    )
    torch.testing.assert_close(result, tensor(expected), rtol=0, atol=1e-12)
