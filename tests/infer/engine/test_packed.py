"""Packed linear layers compute what nn.Linear computes."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from infer.engine.packed import MOST_ROWS, PackedLinear, pack

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN"
)


@given(
    st.integers(1, 3), st.integers(1, MOST_ROWS), st.booleans(), st.integers(0, 2**31)
)
def test_products_are_those_of_linear(
    batch: int, rows: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    linear = nn.Linear(24, 40, bias=bias)
    x = torch.randn(batch, rows, 24)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(x), linear(x))


def test_a_changed_weight_is_packed_again() -> None:
    linear = nn.Linear(8, 8)
    packed = PackedLinear(linear)
    x = torch.randn(4, 8)
    with torch.no_grad():
        linear.weight.mul_(2)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), linear(x))
        packed.weight = nn.Parameter(linear.weight[:3], requires_grad=False)
        packed.bias = None
        packed.out_features = 3
        torch.testing.assert_close(packed(x), x @ linear.weight[:3].T)
        torch.testing.assert_close(copy.deepcopy(packed)(x), packed(x))


def test_other_types_and_gradients_take_the_usual_way() -> None:
    packed = PackedLinear(nn.Linear(8, 8))
    packed(torch.randn(4, 8)).sum().backward()
    assert packed.weight.grad is not None
    with torch.inference_mode():
        assert packed.double()(torch.randn(4, 8).double()).dtype == torch.float64


def test_names_and_tied_weights_stay() -> None:
    lm = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9), nn.Linear(9, 2).double())
    lm[1].weight = lm[0].weight
    before = lm.state_dict()
    pack(lm)
    assert type(lm[1]) is PackedLinear and lm[1].weight is lm[0].weight
    assert type(lm[2]) is nn.Linear
    assert lm.state_dict().keys() == before.keys()
