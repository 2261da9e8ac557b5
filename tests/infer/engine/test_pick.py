"""Test keyed sampling: its distribution, its keys, and the library's warpers as reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from infer.engine.pick import (
    Logits,
    candidates,
    likeliest,
    pick,
    probabilities,
    top,
)
from infer.engine.sampling import Sampling


def rows(values: torch.Tensor) -> Logits:
    return Logits(nn.Identity(), values, values)


def keys(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(n), torch.full((n,), seed)


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)


def by_library(values: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return (n, V) probabilities after Transformers' own warpers."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers(None, values.clone()).softmax(-1)


@given(
    st.integers(0, 10**6),
    st.sampled_from([0.2, 0.8, 1.0, 3.0]),
    st.sampled_from([0, 1, 10, 5000]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([50, 1000]),
)
def test_the_target_distribution_is_the_librarys(
    seed: int, temperature: float, top_k: int, top_p: float, V: int
) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    values = random(4, V, seed=seed)
    result = probabilities(rows(values), sampling)
    torch.testing.assert_close(result, by_library(values, sampling))


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 positions."""
    sampling = Sampling(1.0, 0, 0.9)
    n = 20_000
    values = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -1.0]]).expand(n, -1)
    drawn = pick(rows(values), sampling, *keys(n, seed=5))
    counts = torch.bincount(drawn, minlength=6)
    target = by_library(values[:1], sampling)[0].double()
    assert counts[target == 0].sum() == 0
    expected = n * (target / target.sum())[target > 0]
    assert stats.chisquare(counts[target > 0], expected).pvalue > 0.01


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(1.0), Sampling(0.7, 10, 0.95), Sampling(1e-30)],
)
@pytest.mark.parametrize("choose", [candidates, likeliest])
def test_the_first_candidate_is_the_pick(choose, sampling: Sampling) -> None:
    """Weights are finite at a temperature near zero too."""
    logits = rows(random(50, 100))
    ids, weights = choose(logits, sampling, *keys(50), 4)
    assert torch.equal(ids[:, 0], pick(logits, sampling, *keys(50)))
    assert (weights.diff(dim=1) <= 0).all() and (weights >= 0).all()
    assert (weights.sum(1) <= 1.0001).all()


@given(st.integers(1, 4), st.integers(1, 2000), st.integers(1, 9), st.integers(0, 99))
def test_top_is_topk(n: int, V: int, m: int, seed: int) -> None:
    m = min(m, V)
    values = random(n, V, seed=seed)
    result, ids = top(values, m)
    assert torch.equal(result, values.topk(m).values)
    assert torch.equal(values.gather(1, ids), result)


def test_in_a_narrow_type_the_top_logits_are_exact() -> None:
    """A near-tie must not depend on a kernel's rounding for a number of rows."""
    torch.manual_seed(0)
    head = nn.Linear(32, 300).bfloat16()
    hidden = torch.randn(40, 32).bfloat16()
    logits = Logits(head, hidden, head(hidden))
    exact = hidden.float() @ head.weight.float().T + head.bias.float()
    values, ids = logits.top(4)
    torch.testing.assert_close(values, exact.gather(1, ids), rtol=1e-6, atol=1e-5)
    assert torch.equal(ids[:, 0], exact.argmax(-1))
    assert torch.equal(ids[:, 0], logits.whole().argmax(-1))


def test_sampling_reads_rescored_logits_of_a_trainable_head() -> None:
    """Bug: at a temperature without top_k, decoding in int8 or bfloat16 ended in a traceback."""
    torch.manual_seed(0)
    head = nn.Linear(32, 300)
    hidden = torch.randn(4, 32)
    logits = Logits(head, hidden, head(hidden).detach(), narrow=True)
    drawn = pick(logits, Sampling(1.0), *keys(4))
    assert drawn.shape == (4,)


def test_logits_that_replace_others_are_not_computed_again() -> None:
    """Regression: with a head in int8, replaced logits were computed again from the head.

    This happened after a processor and in verification by ratio, for the eight largest logits.
    """
    torch.manual_seed(0)
    head = nn.Linear(8, 20)
    head.int8 = True
    hidden = torch.randn(3, 8)
    logits = Logits(head, hidden, head(hidden).detach())
    other = random(3, 20).float()
    for replaced in (logits.replaced(other), logits.replaced(other)[:3]):
        assert torch.equal(replaced.whole(), other)
        assert torch.equal(replaced.top(1)[0][:, 0], other.amax(1))
