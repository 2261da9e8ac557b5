"""Rounded weights and exact integer products on a CPU."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from conf.devices.int8 import (
    LARGEST_SUM,
    MOST,
    Fbgemm,
    Groups,
    Kernel,
    Native,
    NativeGroups,
    OneDNN,
    exact_kernel,
    is_exact,
    pack,
)
from tests.conftest import on_threads

BYTES = st.integers(-MOST, MOST)
NATIVE = pytest.mark.skipif(
    not issubclass(exact_kernel() or Kernel, Native),
    reason="no AVX2, or no C compiler",
)


class Fours(Groups):
    """NativeGroups without native.c."""

    size = 4


@pytest.fixture
def native() -> type[Kernel]:
    """The kernel of native.c on this CPU."""
    kernel = exact_kernel()
    assert kernel is not None
    return kernel


@pytest.mark.parametrize(
    ("kernel", "groups"),
    [(Fbgemm, [[0, 1], [2, 3]]), (Fours, [[0, 1, 4, 5], [2, 3, 6, 7]])],
)
@given(row=st.lists(BYTES, min_size=1, max_size=20))
def test_no_group_of_limited_weights_overflows_in_sixteen_bits(
    kernel: type[Groups], groups: list[list[int]], row: list[int]
) -> None:
    limited = kernel.limit(torch.tensor([row], dtype=torch.int8))[0].tolist()
    assert len(limited) == len(row)
    for at in range(0, len(row), 2 * kernel.size):
        for group in groups:
            columns = [at + column for column in group if at + column < len(row)]
            for sign in (1, -1):
                before = [max(0, sign * row[column]) for column in columns]
                after = [max(0, sign * limited[column]) for column in columns]
                # The largest sum has inputs of 255 at the weights of one sign.
                assert 255 * sum(after) < 2**15
                if sum(before) <= LARGEST_SUM:
                    assert after == before
                else:  # the same share of each is left, rounded down
                    total = sum(before)
                    shares = [b * LARGEST_SUM // total for b in before]
                    assert after == shares


def error(weight: Tensor, kernel: type[Kernel]) -> float:
    rounded, scale = kernel.round(weight)
    difference = rounded * scale[:, None] - weight
    return float(difference.square().sum() / weight.square().sum())


def test_groups_have_more_levels_than_seven_bits() -> None:
    """Weights of 63 levels would have four times the squared error of 127 levels."""
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    exact, pairs, fours = (error(weight, kernel) for kernel in (OneDNN, Fbgemm, Fours))
    assert exact < pairs < 2.2 * exact
    assert pairs < fours < 4 * exact


def test_an_output_row_of_zeros_stays_zero() -> None:
    rounded, scale = Fbgemm.round(torch.zeros(2, 5))
    assert not rounded.any() and scale.isfinite().all()


@pytest.mark.skipif(exact_kernel() is None, reason="no exact products on this CPU")
def test_products_are_exact_for_every_number_of_rows() -> None:
    kernel = exact_kernel()
    assert kernel is not None
    assert all(is_exact(kernel, rows) for rows in (1, 2, 7, 33))


@NATIVE
@given(
    rows=st.integers(1, 9),
    d=st.integers(1, 70),
    tail=st.floats(0, 3),
    seed=st.integers(0, 9),
)
def test_native_code_rounds_groups_as_pytorch_does(
    rows: int, d: int, tail: float, seed: int
) -> None:
    """Weights with long tails need few levels; weights between -1 and 1 many."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, d, generator=generator)
    weight *= weight.abs() ** tail
    weight[0] = 0
    weight[-1, ::2] = 1
    expected, scale = Fours.round(weight)
    rounded, same = NativeGroups.round(weight)
    assert torch.equal(rounded, expected) and torch.equal(same, scale)


@NATIVE
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_not_hidden(value: float) -> None:
    weight = torch.ones(2, 9)
    weight[1, 3] = value
    first, second = pack(weight, NativeGroups)(torch.ones(9))
    assert first.isfinite() and not second.isfinite()


@NATIVE
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 90),
    d=st.integers(1, 40) | st.sampled_from([64, 128]),
    seed=st.integers(0, 9),
)
def test_native_products_are_integers_of_every_size(
    native: type[Kernel], rows: int, outputs: int, d: int, seed: int
) -> None:
    """Sizes between the blocks of products.h are padded; inputs and weights are the largest that occur.

    AMX multiplies if the number of columns is a multiple of 64, by up to 32 rows and two blocks of 16
    outputs at once.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-MOST, MOST + 1, (rows, d), generator=generator)
    x[:, 0] = MOST  # so that no row is scaled
    weight = torch.randint(-MOST, MOST + 1, (outputs, d), generator=generator)
    weight[::2] = weight[::2].sign() * MOST
    limited = native.limit(weight.to(torch.int8))
    kernel = native(limited, torch.full((outputs,), float(MOST)))
    expected = (x @ limited.long().T).float() * MOST
    assert torch.equal(kernel(x.float()), expected)


@NATIVE
@pytest.mark.parametrize("d", [48, 64])
def test_threads_share_a_native_product(
    monkeypatch: pytest.MonkeyPatch, native: type[Kernel], d: int
) -> None:
    kernel = pack(torch.randn(70, d), native)
    x = torch.randn(9, d)
    expected = kernel(x)
    monkeypatch.setattr("conf.devices.int8.DIVIDED", 1)
    with on_threads(2):
        assert torch.equal(kernel(x), expected)


@NATIVE
def test_a_librarys_kernel_gives_the_same_bits(native: type[Kernel]) -> None:
    """Libraries add products in pairs, so the weights limited for more columns suit them too."""
    other = Fbgemm if issubclass(native, NativeGroups) else OneDNN
    if not is_exact(other, 7):
        pytest.skip(f"{other.__name__} is not exact on this CPU")
    weight, x = torch.randn(50, 64), torch.randn(7, 64)
    rounded = native.round(weight)
    assert torch.equal(native(*rounded)(x), other(*rounded)(x))


@pytest.mark.skipif(exact_kernel() is None, reason="no exact products on this CPU")
def test_a_weight_is_rounded_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = exact_kernel()
    assert kernel is not None
    weight, x = torch.randn(10, 16), torch.randn(3, 16)
    expected = pack(weight, kernel)(x)
    monkeypatch.setattr("conf.devices.int8.BLOCK", 4)
    assert torch.equal(pack(weight, kernel)(x), expected)


def test_a_build_without_quantized_tensors_is_not_asked_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("conf.devices.int8.FBGEMM_PRODUCT", "removed")
    assert exact_kernel.__wrapped__() is not Fbgemm


def test_the_engine_of_quantized_products_stays_as_it_was() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no FBGEMM in this build of PyTorch")
    before = torch.backends.quantized.engine
    Fbgemm(torch.ones(2, 4, dtype=torch.int8), torch.ones(2))
    assert torch.backends.quantized.engine == before
