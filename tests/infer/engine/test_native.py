"""Test the int8 decoder in C: values, rows beside other rows, threads, no compiler."""

import copy
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conf.devices.int8 import MOST, ZERO_POINT, exact_kernel
from infer.engine import native
from infer.engine.forward import Target
from infer.engine.fused import RowNorm
from infer.engine.int8 import to_int8
from infer.engine.native import LANES, Inputs, NativeDecoder, library
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.trees.tree import Tree
from tests.infer.engine.test_fused import MODELS, logits, model_of

pytestmark = pytest.mark.skipif(
    exact_kernel() is None or library() is None,
    reason="no exact int8 products, or no C compiler",
)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def int8_model(name: str) -> PreTrainedModel:
    """Return a random model of test_fused.py in int8."""
    lm = model_of(copy.deepcopy(MODELS[name]), packed=False)
    to_int8(lm)
    return lm


def native_decoder(lm: PreTrainedModel) -> NativeDecoder:
    decoder = Target(lm, batch=1, capacity=8).fused
    assert isinstance(decoder, NativeDecoder)
    return decoder


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_pytorchs_operations(
    monkeypatch: pytest.MonkeyPatch, name: str, batch: int
) -> None:
    lm = int8_model(name)
    native_decoder(lm)
    fast = logits(lm, batch)
    monkeypatch.setattr(native, "library", lambda: None)
    assert type(Target(lm, batch=1, capacity=8).fused) is not NativeDecoder
    for ours, theirs in zip(fast, logits(lm, batch)):
        # A last bit can become a whole step of int8 in a later layer.
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("name", ["llama", "qwen2, a window in the second layer"])
def test_a_prompts_rows_are_the_same_on_several_threads_and_beside_others(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    lm = int8_model(name)
    prompts = [list(range(30)), list(range(40, 57))]
    tree = Tree((3, 9, 4), (-1, 0, 0), 3)

    def after(prompts: list[list[int]]) -> Tensor:
        runner = Runner(lm, capacity=60, max_rows=8, batch=len(prompts))
        runner.prefill(prompts)
        requests = [Request(prompt) for prompt in prompts]
        output = runner.forward([tree] * len(prompts), requests, GREEDY)
        return output.logits.whole()

    alone = torch.cat([after([prompt]) for prompt in prompts])
    assert torch.equal(after(prompts), alone)
    monkeypatch.setattr(native, "DIVIDED", 1)
    torch.set_num_threads(2)
    try:
        assert torch.equal(after(prompts), alone)
    finally:
        torch.set_num_threads(1)


def test_a_norm_adds_the_product_and_scales_its_rows() -> None:
    """h += y largest + bias, then the norm, as numbers to 127 and the largest of each row."""
    torch.manual_seed(0)
    decoder = native_decoder(int8_model("llama"))
    h, y = torch.randn(2, 1, 5, 48)
    largest, bias = torch.rand(1, 5), torch.randn(48)
    total = h + y * largest[..., None] + bias
    norm = decoder._layers[0].norms[0]
    assert isinstance(norm, RowNorm)
    normed = norm(total)
    x = Inputs.empty((1, 5), 48, torch.float32)
    decoder._add_norm(h, native.Outputs(y, largest, bias), norm, x)
    torch.testing.assert_close(h, total)
    torch.testing.assert_close(x.largest, normed.abs().amax(-1))
    torch.testing.assert_close(x.rows * x.largest[..., None] / MOST, normed)


def test_rounded_rows_are_the_scaled_ones_rounded() -> None:
    """oneDNN reads integers with 128 added; FBGEMM rounds by itself."""
    torch.manual_seed(0)
    decoder = native_decoder(int8_model("llama"))
    y = native.Outputs(torch.randn(1, 7, 200), torch.rand(1, 7), torch.randn(200))
    rows = {}
    for dtype in (torch.float32, torch.uint8):
        x = Inputs.empty((1, 7), 96, dtype)
        decoder._activate(y, x)
        rows[dtype] = x.rows
    expected = (rows[torch.float32] + (ZERO_POINT + 0.5)).floor()
    assert torch.equal(rows[torch.uint8].float(), expected)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_overflows_stays_in_its_row(value: float) -> None:
    decoder = native_decoder(int8_model("llama"))
    norm = decoder._layers[0].norms[0]
    h = torch.randn(1, 4, 48)
    results = []
    for number in (1.0, value):
        h[0, 2, 5] = number
        x = Inputs.empty((1, 4), 48, torch.float32)
        decoder._add_norm(h.clone(), None, norm, x)
        results.append(x)
    others = [0, 1, 3]
    assert not results[1].largest[0, 2].isfinite()
    for before, after in zip(results[0][:2], results[1][:2]):
        assert torch.equal(before[:, others], after[:, others])


def test_a_row_of_zeros_stays_zero() -> None:
    decoder = native_decoder(int8_model("llama"))
    x = Inputs.empty((1, 1), 48, torch.float32)
    decoder._add_norm(torch.zeros(1, 1, 48), None, decoder._layers[0].norms[0], x)
    assert x.largest == 0
    assert not x.rows.any()


def test_silu_has_a_small_error_everywhere() -> None:
    decoder = native_decoder(int8_model("llama"))
    gates = torch.cat(
        [torch.linspace(-120, 120, 4001), torch.zeros(LANES - 4001 % LANES)]
    )
    n = len(gates)
    y = torch.cat([gates, torch.ones(n)]).view(1, 1, -1)
    x = Inputs.empty((1, 1), n, torch.float32)
    decoder._activate(native.Outputs(y, torch.ones(1, 1), torch.zeros(2 * n)), x)
    actual = x.rows[0, 0] * x.largest[0, 0] / MOST
    torch.testing.assert_close(
        actual, torch.nn.functional.silu(gates), atol=1e-5, rtol=1e-6
    )


def test_without_a_compiler_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc -m64")
    with caplog.at_level(logging.WARNING):
        assert library.__wrapped__() is None
    assert "/nowhere/cc could not compile native.c. Install gcc" in caplog.text


def test_other_activations_and_widths_take_pytorchs_operations() -> None:
    lm = int8_model("llama")
    lm.config.hidden_act = "gelu"
    assert type(Target(lm, batch=1, capacity=8).fused) is not NativeDecoder
    lm.config.hidden_act = "silu"
    lm.config.head_dim = 12
    gate = native_decoder(int8_model("llama"))._gate
    assert type(native.decoder_of(lm, gate, wide=True)) is not NativeDecoder
