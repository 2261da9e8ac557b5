"""Test that packed linear layers compute the same as nn.Linear."""

import copy
from collections.abc import Collection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from infer.engine.attention import ProbeGate
from infer.engine.gate import GatedLinear
from infer.engine.packed import TYPES, PackedLinear, Product, pack

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN"
)
WIDTHS = {"q_proj": 40, "k_proj": 8, "v_proj": 24}


def packed_of(linear: nn.Linear) -> PackedLinear:
    """Return the layer, packed alone."""
    packed = PackedLinear(linear)
    Product({packed: None})
    return packed


def attention(
    *, bias: bool, gate: ProbeGate | None = None, adapted: Collection[str] = WIDTHS
) -> nn.Module:
    """Three layers that read the same input; gated, some with an adapter."""
    module = nn.Module()
    for name, width in WIDTHS.items():
        layer: nn.Module = nn.Linear(24, width, bias=bias and name != "k_proj")
        if gate is not None and name in adapted:
            a, b = torch.randn(3, 24), torch.randn(width, 3)
            layer = GatedLinear(layer, a, b, 0.5, gate)
        module.add_module(name, layer)
    return module


def outputs(module: nn.Module, x: Tensor) -> list[Tensor]:
    return [module.get_submodule(name)(x) for name in WIDTHS]


@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from(TYPES or [torch.float32]),
    st.integers(0, 2**31),
)
def test_products_are_those_of_linear(
    batch: int, rows: int, bias: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    module = attention(bias=bias).to(dtype)
    packed = copy.deepcopy(module)
    pack(packed, 1 << 20)
    assert type(packed.get_submodule("q_proj")) is PackedLinear
    x = torch.randn(batch, rows, 24, dtype=dtype)
    tolerance = {"atol": 0.02, "rtol": 0.02} if dtype == torch.bfloat16 else {}
    with torch.inference_mode():
        expected = outputs(module, x)
        for _ in range(2):
            torch.testing.assert_close(outputs(packed, x), expected, **tolerance)


@pytest.mark.parametrize(
    ("sequences", "first", "rows", "adapted"),
    [(1, 1, 4, WIDTHS), (3, 2, 7, ["v_proj"])],
)
def test_an_adapters_products_are_part_of_its_layers(
    sequences: int, first: int, rows: int, adapted: Collection[str]
) -> None:
    """A layer may change its part in place, so a second call computes the part again.

    Regression: v_proj's adapter did not act if q_proj without an adapter was called first.
    """
    torch.manual_seed(0)
    gate = ProbeGate()
    module = attention(bias=True, gate=gate, adapted=adapted)
    packed = copy.deepcopy(module)
    pack(packed, 1 << 20)
    gates = [gate, ProbeGate.of(packed)]
    x = torch.randn(sequences, rows, 24)
    with torch.inference_mode():
        torch.testing.assert_close(outputs(packed, x), outputs(module, x))
        with gates[0].open(first, rows), gates[1].open(first, rows):
            expected = outputs(module, x)
            for _ in range(2):
                actual = outputs(packed, x)
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(outputs(packed, x), outputs(module, x))


@pytest.mark.skipif(torch.bfloat16 not in TYPES, reason="no kernels of bfloat16")
@pytest.mark.parametrize("rows", [1, 5, 16, 33])
def test_bfloat16_with_amx_multiplies_a_fixed_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """A row does not depend on the rows beside it, and padding is cut off again."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    torch.manual_seed(0)
    packed = packed_of(nn.Linear(24, 40).bfloat16())
    x = torch.randn(40, 24, dtype=torch.bfloat16)
    with torch.inference_mode():
        alone = torch.cat([packed(row[None]) for row in x])
        chosen = torch.randperm(40)[:rows]
        y = packed(x[chosen][None])
    assert y.shape == (1, rows, 40) and torch.equal(y[0], alone[chosen])


def test_an_input_is_freed_once_all_layers_have_their_part() -> None:
    """Bug: a prompt's inputs of all products were held until the next forward."""
    module = attention(bias=False)
    pack(module, 1 << 40)
    with torch.inference_mode():
        x = torch.randn(2, 5, 24)
        first, *rest = (getattr(module, name) for name in WIDTHS)
        first(x)
        assert first.product._last[0] is x
        for layer in rest:
            layer(x)
    assert first.product._last == (None, {})


def test_a_changed_weight_is_packed_again() -> None:
    linear = nn.Linear(8, 8)
    packed = packed_of(linear)
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
    packed = packed_of(nn.Linear(8, 8))
    packed(torch.randn(4, 8)).sum().backward()
    assert packed.weight.grad is not None
    with torch.inference_mode():
        assert packed.double()(torch.randn(4, 8).double()).dtype == torch.float64


def test_names_and_tied_weights_stay() -> None:
    lm = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9), nn.Linear(9, 2).double())
    lm[1].weight = lm[0].weight
    before = lm.state_dict()
    pack(lm, 1 << 20)
    assert type(lm[1]) is PackedLinear and lm[1].weight is lm[0].weight
    assert type(lm[2]) is nn.Linear
    assert lm.state_dict().keys() == before.keys()
