"""Test the choice of tokens by native.c beside sorts of all logits and noise."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from conf.devices.bfloat16 import bfloat16_kernel
from conf.devices.int8 import Native, exact_kernel
from infer.engine.native_choice import NativeRows
from infer.engine.noise import gumbel, keys_of
from infer.engine.pick import Logits, candidates, pick
from infer.engine.rounded import RoundedHead, RoundedProduct
from infer.engine.sampling import Sampling

KERNEL = exact_kernel()
pytestmark = pytest.mark.skipif(
    KERNEL is None or not issubclass(KERNEL, Native),
    reason="no exact int8 products, or no C compiler",
)
D = 16


def head_of(linear: nn.Linear, dtype: str = "int8") -> RoundedHead:
    kernel = KERNEL if dtype == "int8" else bfloat16_kernel()
    assert kernel is not None
    head = RoundedHead(linear)
    RoundedProduct({head: None}, kernel)
    return head


def rows_of(logits_nV: Tensor) -> NativeRows:
    """Return rows of these logits, which are not computed again."""
    n, V = logits_nV.shape
    rows = head_of(nn.Linear(D, V)).rows(torch.zeros(n, D), logits_nV, again=0)
    assert rows is not None
    return rows


@given(
    st.integers(1, 300).flatmap(
        lambda V: st.tuples(st.just(V), st.integers(1, min(V, 20)))
    ),
    st.integers(0, 8),
    st.sampled_from([3, 1000]),
    st.booleans(),
    st.integers(0, 2**20),
    st.sampled_from(["int8", "bfloat16"]),
)
def test_the_largest_logits_are_those_of_a_sort(
    sizes: tuple[int, int], exact: int, levels: int, bias: bool, seed: int, dtype: str
) -> None:
    """Few levels give many equal logits: the lowest ids come first."""
    (V, m), exact = sizes, min(exact, sizes[1])
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels, (3, V), generator=generator).float()
    hidden = torch.randn(3, D, generator=generator)
    linear = nn.Linear(D, V, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(V, D, generator=generator))
        if dtype == "bfloat16":
            linear.bfloat16()
        rows = head_of(linear, dtype).rows(hidden, logits, exact)
        assert rows is not None
        result = rows.top(m)
        rescored = linear.double()(hidden.double()).float()
    ids = logits.argsort(dim=1, descending=True, stable=True)[:, :m]
    values = logits.gather(1, ids)
    values[:, :exact] = rescored.gather(1, ids)[:, :exact]
    order = values.argsort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(result[0], values.gather(1, order))
    assert torch.equal(result[1], ids.gather(1, order))


def test_a_row_that_is_not_finite_has_ids_of_tokens() -> None:
    rows = rows_of(torch.full((1, 200), float("nan")))
    assert rows.top(10)[1].tolist() == [[*range(10)]]
    for sampling in (Sampling(1.0), Sampling(1.0, top_p=0.5), Sampling(1.0, top_k=5)):
        assert 0 <= int(rows.pick(sampling, [1])) < 200


def test_other_types_take_pytorchs_operations() -> None:
    for head in (
        head_of(nn.Linear(D, 200).double()),
        head_of(nn.Linear(D, 200).bfloat16()),
        head_of(nn.Linear(D, 200), "bfloat16"),
    ):
        assert head.rows(torch.randn(1, D), torch.randn(1, 200), again=8) is None


SEEDS = st.integers(0, 2**63 - 1)
#: Sizes of vocabularies that fill blocks of 64 and of 512 tokens, or not.
VOCABULARIES = st.sampled_from([1, 7, 64, 500, 3000])


def some_logits(seed: int, n: int, V: int, spread: float) -> Tensor:
    """Return (n, V) logits, some of them equal or excluded."""
    generator = torch.Generator().manual_seed(seed % 2**32)
    logits = (spread * torch.randn(n, V, generator=generator)).mul(8).round() / 8
    excluded = torch.rand(n, V, generator=generator) < 0.3
    return logits.masked_fill(excluded & (torch.arange(V) > 0), float("-inf"))


def noise_of(seeds: Tensor, positions: Tensor, V: int) -> Tensor:
    return gumbel(seeds, positions, torch.arange(V).expand(len(seeds), -1))


@given(
    SEEDS,
    st.integers(0, 2**31),
    VOCABULARIES,
    st.sampled_from([0.0, 0.1, 2.0, 30.0, 1e4, 1e30]),
    st.sampled_from([0.3, 1.0, 1.7]),
)
def test_a_pick_is_the_noisiest_of_all_tokens(
    seed: int, position: int, V: int, spread: float, temperature: float
) -> None:
    keys = torch.tensor([seed, seed]), torch.tensor([position, position + 1])
    logits = some_logits(seed, 2, V, spread)
    noisy = (logits / temperature).double() + noise_of(*keys, V)
    picks = rows_of(logits).pick(Sampling(temperature), keys_of(*keys))
    assert torch.equal(picks, noisy.argmax(1))


@given(
    SEEDS,
    VOCABULARIES,
    st.sampled_from([0.1, 2.0, 5.0]),
    st.sampled_from([0.5, 1.0]),
    st.floats(0.01, 0.999),
    st.sampled_from([0, 1, 5, 5000]),
)
def test_a_pick_of_a_nucleus_is_its_noisiest_token(
    seed: int, V: int, spread: float, temperature: float, top_p: float, top_k: int
) -> None:
    """Equal logits are in the order of their ids, as in the sort."""
    keys = torch.tensor([seed]), torch.tensor([5])
    logits = some_logits(seed, 1, V, spread)
    values, ids = (logits[0] / temperature).sort(descending=True, stable=True)
    values, ids = values[: top_k or V], ids[: top_k or V]
    shares = values.double().softmax(0)
    before = shares.cumsum(0) - shares
    assume(bool(((before - top_p).abs() > 1e-5).all()))
    noisy = values.double() + noise_of(*keys, V)[0, ids]
    expected = ids[noisy.masked_fill(before >= top_p, float("-inf")).argmax()]
    pick = rows_of(logits).pick(Sampling(temperature, top_k, top_p), keys_of(*keys))
    assert int(pick) == int(expected)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_pick_has_the_probability_of_its_token(top_p: float) -> None:
    """The bound of the noise must not lose unlikely tokens: half of the mass is in tokens of 1/4,000."""
    logits = torch.full((2000, 2001), -7.6)
    logits[:, 0] = 0.0
    keys = keys_of(torch.ones(2000, dtype=torch.int64), torch.arange(2000))
    picks = rows_of(logits).pick(Sampling(1.0, top_p=top_p), keys)
    mass = logits[0].softmax(0)[1:].sum().item() - (1 - top_p)
    count = int((picks > 0).sum())
    assert stats.binomtest(count, 2000, mass / top_p).pvalue > 0.01


@given(
    SEEDS,
    st.sampled_from(
        [
            Sampling(0.7),
            Sampling(1.0, top_p=0.8),
            Sampling(1.3, 5),
            Sampling(1.0, 9, 0.6),
        ]
    ),
    st.sampled_from([9, 300]),
)
def test_choices_equal_those_of_pytorch(seed: int, sampling: Sampling, V: int) -> None:
    """Picks and candidates by PyTorch's operations, where the likeliest logits are computed again."""
    generator = torch.Generator().manual_seed(seed % 2**32)
    linear = nn.Linear(D, V)
    hidden = torch.randn(3, D, generator=generator)
    with torch.inference_mode():
        linear.weight.copy_(torch.randn(V, D, generator=generator))
        approximate = linear(hidden) + 0.01 * torch.randn(3, V, generator=generator)
        keys = torch.arange(3), torch.full((3,), seed)
        fast = Logits(head_of(linear), hidden, approximate.clone())
        slow = Logits(linear, hidden, approximate, narrow=True)
        assert fast.native is not None and slow.native is None
        assert torch.equal(pick(fast, sampling, *keys), pick(slow, sampling, *keys))
        ids, weights = candidates(fast, sampling, *keys, 4)
        expected, of_expected = candidates(slow, sampling, *keys, 4)
        torch.testing.assert_close(weights, of_expected, rtol=1e-4, atol=1e-4)
        drawn = of_expected > 0
        assert torch.equal(ids[drawn], expected[drawn])
        assert torch.equal(fast.whole(), slow.whole())  # the logits are as they were
