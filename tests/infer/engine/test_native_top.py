"""Test RoundedHead.top beside a sort of all logits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conf.devices.bfloat16 import bfloat16_kernel
from conf.devices.int8 import Native, exact_kernel
from infer.engine.rounded import RoundedHead, RoundedProduct

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
        result = head_of(linear, dtype).top(hidden, logits, m, exact)
        rescored = linear.double()(hidden.double()).float()
    assert result is not None
    ids = logits.argsort(dim=1, descending=True, stable=True)[:, :m]
    values = logits.gather(1, ids)
    values[:, :exact] = rescored.gather(1, ids)[:, :exact]
    order = values.argsort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(result[0], values.gather(1, order))
    assert torch.equal(result[1], ids.gather(1, order))


def test_a_row_that_is_not_finite_has_ids_of_tokens() -> None:
    head = head_of(nn.Linear(D, 200))
    logits = torch.full((1, 200), float("nan"))
    with torch.no_grad():
        result = head.top(torch.full((1, D), float("nan")), logits, 10, 8)
    assert result is not None
    assert result[1].tolist() == [[*range(10)]]


def test_other_types_take_pytorchs_operations() -> None:
    for head in (
        head_of(nn.Linear(D, 200).double()),
        head_of(nn.Linear(D, 200).bfloat16()),
        head_of(nn.Linear(D, 200), "bfloat16"),
    ):
        assert head.top(torch.randn(1, D), torch.randn(1, 200), 10, 8) is None
