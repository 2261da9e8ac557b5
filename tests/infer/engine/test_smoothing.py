"""Test the factors that move large inputs of int8 products into the weights."""

import pytest
import torch
from torch import Tensor, nn

from conf.devices.int8 import MOST, exact_kernel
from infer.engine.rounded import RoundedLinear, RoundedProduct, to_int8
from infer.engine.smoothing import record_inputs, smoothing
from tests.conftest import tiny_llama
from tests.infer.engine.test_families import tiny_family


def rows(large: float, first: float = 1.0) -> Tensor:
    """Return 40 rows of 64 numbers. Column 5 is `large` times as large, in the first row `first` times."""
    torch.manual_seed(0)
    x = torch.randn(40, 64)
    x[:, 5] *= large
    x[0, 5] *= first
    return x


def rounded(x: Tensor) -> Tensor:
    """Return rows in int8, each with its scale."""
    step = x.abs().amax(1, keepdim=True) / MOST
    return (x / step).round() * step


def error(x: Tensor, weight: Tensor, s: Tensor) -> Tensor:
    """Return the relative squared error of each row's product by rounding inputs and weights."""
    exact = x @ weight.T
    return (
        ((rounded(x / s) @ rounded(weight * s).T - exact) / exact.norm(dim=1)[:, None])
        .square()
        .sum(1)
    )


@pytest.mark.parametrize(("large", "first"), [(30, 1), (1, 300)])
def test_large_columns_lose_their_effect_on_the_others(large: int, first: int) -> None:
    """In all rows, or in the first alone, as the first token of a text has them; with small weights."""
    x, weight = rows(large, first), torch.randn(48, 64)
    weight[:, 5] /= large * first
    s = smoothing(x, weight)
    before, after = (error(x, weight, s) for s in (torch.ones(64), s))
    worst = before.argmax()
    assert after[worst] < before[worst] / 3
    assert after.mean() < before.mean()
    assert s[5] > 1 and (s.log2() % 1 == 0).all()


def test_even_columns_stay() -> None:
    assert (smoothing(rows(1), torch.randn(48, 64)) == 1).all()


def test_a_column_that_is_large_in_half_of_the_text_stays() -> None:
    """Bug while this was written: factors of the whole sample made Qwen2's down projections twice as wrong."""
    x = rows(1)
    for row in range(1, 20):
        x[row, row + 5] *= 60
    for row in range(20, 40):
        x[row, row + 20] *= 60
    weight = torch.randn(48, 64)
    s = smoothing(x, weight)
    assert error(x, weight, s).mean() < 1.1 * error(x, weight, torch.ones(64)).mean()


def test_inputs_are_those_of_the_layers() -> None:
    lm = tiny_llama()
    layers = [lm.model.layers[0].self_attn.q_proj, lm.model.layers[0].self_attn.k_proj]
    inputs = record_inputs(lm, [*layers, nn.Linear(2, 2)], [5, 17, 9])
    with torch.inference_mode():
        expected = lm.model.layers[0].input_layernorm(
            lm.model.embed_tokens(torch.tensor([5, 17, 9]))
        )
    assert list(inputs) == layers
    torch.testing.assert_close(inputs[layers[0]], expected)
    assert inputs[layers[0]].data_ptr() == inputs[layers[1]].data_ptr()
    assert not layers[0]._forward_pre_hooks


@pytest.mark.skipif(
    exact_kernel() is None, reason="products in int8 are not exact on this CPU"
)
def test_a_product_with_factors_is_the_product() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 48), rows(30)
    errors = []
    with torch.inference_mode():
        for inputs in (None, x):
            layer = RoundedLinear(linear, inputs)
            RoundedProduct({layer: None}, exact_kernel())
            errors.append((layer(x) - linear(x)).norm())
            assert layer.inputs is None
    assert errors[1] < errors[0] / 2


@pytest.mark.skipif(
    exact_kernel() is None, reason="products in int8 are not exact on this CPU"
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt, projected"])
def test_a_model_with_factors_computes_the_same(family: str) -> None:
    """By native.c, and by the library's layers."""
    ids = torch.tensor([[5, 17, 9, 30, 2, 44]])
    make = tiny_llama if family == "llama" else lambda: tiny_family(family)
    lm = make()
    to_int8(lm, ids[0].tolist())
    with torch.inference_mode():
        exact = make()(ids).logits
        assert (lm(ids).logits - exact).norm() < 0.1 * exact.norm()
