"""Test the noise of sampling: its distribution, its keys, and the token that it chooses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from infer.engine.noise import _hashed, gumbel, noise, noisiest

SEEDS = st.integers(0, 2**63 - 1)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31), st.integers(0, 2**20))
def test_noise_is_the_same_by_numpy_and_by_pytorch(
    seed: int, position: int, id: int
) -> None:
    keys = torch.tensor([seed]), torch.tensor([position]), torch.tensor([[id, id + 1]])
    by_numpy = _hashed(*(key.numpy() for key in keys))
    assert torch.equal(torch.from_numpy(by_numpy), _hashed(*keys))


def test_noise_is_a_standard_gumbel_and_depends_on_seed_position_and_token() -> None:
    ids = torch.arange(2000).expand(3, -1)
    noise = gumbel(torch.tensor([1, 1, 2]), torch.tensor([8, 9, 8]), ids)
    assert stats.kstest(noise.flatten().numpy(), stats.gumbel_r.cdf).pvalue > 0.01
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(stats.pearsonr(noise[a].numpy(), noise[b].numpy())[0]) < 0.08


def reference(values: torch.Tensor, seed: int, position: int) -> int:
    """Return the argmax of values plus noise, with the noise of all tokens."""
    ids = torch.arange(len(values))[None]
    keys = torch.tensor([seed]), torch.tensor([position])
    return int((values.double() + gumbel(*keys, ids)[0]).argmax())


@given(SEEDS, st.integers(0, 2**31), st.integers(0, 2**20))
def test_noise_of_one_token_is_gumbels(seed: int, position: int, id: int) -> None:
    keys = torch.tensor([seed]), torch.tensor([position]), torch.tensor([[id]])
    assert noise(seed, position, id) == pytest.approx(float(gumbel(*keys)), rel=1e-12)


@given(
    SEEDS,
    st.integers(0, 2**31),
    st.sampled_from([1, 7, 500, 3000]),
    st.sampled_from([0.0, 0.1, 2.0, 30.0, 1e4, 1e30]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_the_noisiest_token_is_that_of_all_noise(
    seed: int,
    position: int,
    V: int,
    spread: float,
    dtype: torch.dtype,
) -> None:
    """Values may be equal, of any size, and -inf for tokens that a processor excludes."""
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(spread * rng.standard_normal(V)).to(dtype)
    values[torch.from_numpy(rng.random(V) < 0.3)] = float("-inf")
    result = noisiest(values, seed, position)
    if bool(values.isfinite().any()):
        assert result == reference(values, seed, position)
    else:
        assert 0 <= result < V


def test_unlikely_tokens_are_chosen_as_often_as_they_should() -> None:
    """The bound must not lose them: half of the mass is in tokens of probability 1/4,000."""
    values = torch.cat([torch.tensor([0.0]), torch.full((2000,), -np.log(2000.0))])
    count = sum(noisiest(values, 1, i) > 0 for i in range(2000))
    assert stats.binomtest(count, 2000, 0.5).pvalue > 0.01


def test_values_that_are_not_numbers_choose_a_token() -> None:
    """A row that overflows is refused after its pick."""
    values = torch.tensor([1.0, float("nan"), 2.0])
    assert 0 <= noisiest(values, 0, 0) < 3
