"""Test products with weights in bfloat16 by native.c: values, and rows beside other rows."""

from collections.abc import Iterator
from ctypes import CDLL

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.devices import native
from conf.devices.bfloat16 import NativeBFloat16, bfloat16_kernel
from conf.devices.int8 import pack
from tests.conftest import on_threads

pytestmark = pytest.mark.skipif(
    bfloat16_kernel() is None, reason="no AVX2, or no C compiler"
)
#: The compiler's flags for a CPU without some instructions. Without those for bfloat16 rows are in float32.
LACKING = {
    "nothing": "",
    "AMX": "-mno-amx-bf16",
    "bfloat16": "-mno-amx-bf16 -mno-avx512bf16",
    "AVX512": "-mno-amx-bf16 -mno-avx512f",
}


@pytest.fixture(params=LACKING, scope="module")
def kernel(request: pytest.FixtureRequest) -> Iterator[type[NativeBFloat16]]:
    """The kernel of this CPU, and of the same CPU without some instructions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", f"cc {LACKING[request.param]}")
        library: CDLL | None = native.library.__wrapped__("bfloat16")
    if library is None:
        pytest.skip("the compiler does not know these instructions")

    class Kernel(NativeBFloat16):
        @classmethod
        def library(cls) -> CDLL:
            return library

    yield Kernel


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 90),
    d=st.integers(1, 40) | st.sampled_from([64, 96, 128, 200]),
    seed=st.integers(0, 9),
)
def test_a_row_is_the_same_beside_any_rows(
    kernel: type[NativeBFloat16], rows: int, outputs: int, d: int, seed: int
) -> None:
    """AMX multiplies if the number of columns is a multiple of 32; other numbers are padded."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, d, generator=generator)
    weight = torch.randn(outputs, d, generator=generator)
    product = pack(weight, kernel)
    together = product(x)
    last = rows - 1
    assert torch.equal(product(x[last:])[0], together[last])
    assert torch.equal(product(x.flip(0)), together.flip(0))
    rounded = weight.bfloat16().double()
    if kernel.library().input_size() == torch.bfloat16.itemsize:
        x = x.bfloat16()
    expected = x.double() @ rounded.T
    limit = 1e-5 * (x.double().abs() @ rounded.abs().T)
    assert ((together - expected).abs() <= limit).all()


def test_numbers_are_rounded_to_the_nearest_bfloat16(
    kernel: type[NativeBFloat16],
) -> None:
    """Of two numbers that are as near it is the even one; infinities stay."""
    if kernel.library().input_size() != torch.bfloat16.itemsize:
        pytest.skip("rows are in float32")
    x = torch.tensor([1.00390625, 1.01171875, -3.3, 1e-30, 1e38, float("inf")])
    product = pack(torch.ones(1, 1), kernel)
    assert torch.equal(product(x[:, None])[:, 0], x.bfloat16().float())


def test_threads_share_a_product(
    monkeypatch: pytest.MonkeyPatch, kernel: type[NativeBFloat16]
) -> None:
    product = pack(torch.randn(70, 64), kernel)
    x = torch.randn(9, 64)
    expected = product(x)
    monkeypatch.setattr("conf.devices.int8.DIVIDED", 1)
    with on_threads(2):
        assert torch.equal(product(x), expected)


def test_a_value_that_overflows_stays_in_its_row(kernel: type[NativeBFloat16]) -> None:
    product = pack(torch.randn(20, 64), kernel)
    x = torch.randn(5, 64)
    before = product(x)
    x[2, 7] = float("nan")
    after = product(x)
    assert torch.equal(after[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
