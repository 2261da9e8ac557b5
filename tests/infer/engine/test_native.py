"""Test the decoder in C in int8 and bfloat16: values, rows beside other rows, probes, threads, no compiler."""

import copy
import logging
import random
from collections.abc import Iterator
from ctypes import c_float, c_long, c_void_p
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from conf.devices.int8 import MOST, ZERO_POINT, Native, exact_kernel
from conf.devices.native import LANES, library
from infer.engine import fused, native, rounded
from infer.engine.attention import ProbeGate
from infer.engine.forward import Target
from infer.engine.fused import RowNorm
from infer.engine.gate import GatedLinear
from infer.engine.native import NativeDecoder
from infer.engine.output import Request
from infer.engine.packed import linear_layers
from infer.engine.rounded import RoundedLinear, to_bfloat16
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.trees.tree import Tree
from tests.conftest import on_threads, tiny_llama
from tests.infer.engine.test_fused import MODELS, SIZES, logits, model_of
from tests.infer.engine.test_rounded import ENOUGH, round_model

KERNEL = exact_kernel()
pytestmark = pytest.mark.skipif(
    KERNEL is None or not issubclass(KERNEL, Native),
    reason="no exact int8 products, or no C compiler",
)
# Queries are scored in twelves, values are added in 64 or 32 numbers, then in 16 or 8; with AMX by tiles if the
# width of a head is a multiple of 64.
HEADS = {
    "eight query heads of a key head": {"num_attention_heads": 8, "head_dim": 64},
    "two query heads, 128 wide": {"num_attention_heads": 2, "head_dim": 128},
    "three query heads, 72 wide": {"num_attention_heads": 3, "head_dim": 72},
}
ALL_MODELS = MODELS | {
    name: LlamaConfig(**SIZES | {"num_key_value_heads": 1} | heads)
    for name, heads in HEADS.items()
}


@pytest.fixture(params=["int8", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def rounded_model(
    name: str, dtype: str = "int8", rank: int = 0, within: str = ""
) -> PreTrainedModel:
    """Return a random model in `dtype`; with `rank` it has a gated adapter on all layers `within` a module."""
    lm = model_of(copy.deepcopy(ALL_MODELS[name]), packed=False)
    gate = ProbeGate()
    layers = linear_layers(lm) if rank else {}
    for path, linear in layers.items():
        if path != "lm_head" and within in path:
            a = torch.randn(rank, linear.in_features)
            b = torch.randn(linear.out_features, rank)
            lm.set_submodule(path, GatedLinear(linear, a, b, 0.1, gate))
    round_model(lm, dtype)
    return lm


def native_decoder(lm: PreTrainedModel) -> NativeDecoder:
    target = Target(lm, batch=1, capacity=8)
    decoder = target.fused
    assert isinstance(decoder, NativeDecoder)
    assert target.cache.layers[0].keys.dtype == torch.bfloat16  # type: ignore[union-attr]
    return decoder


@pytest.fixture
def attention_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operations round queries, keys, values and the weights of values as native.c does."""
    monkeypatch.setattr(fused, "attend_wide", attend_in_bfloat16)


def attend_in_bfloat16(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    query = as_factors(query.float() * scaling)
    batch, heads, q, _ = query.shape
    groups = heads // key.shape[1]
    key, value = (
        x.bfloat16().double().repeat_interleave(groups, 1) for x in (key, value)
    )
    scores = query.double() @ key.transpose(-1, -2)
    if mask is None:
        mask = torch.ones(q, q, dtype=torch.bool).tril()[None]
    else:
        mask = mask.unflatten(2, (-1, q))[:, :, 0]
    hidden = ~mask if mask.dtype == torch.bool else mask < 0
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return as_factors(weights) @ value / weights.sum(-1, keepdim=True)


def multiplies_in_bfloat16() -> bool:
    bfloat16 = library("bfloat16")
    assert bfloat16 is not None
    return bool(bfloat16.input_size() == 2)


def as_factors(x: Tensor) -> Tensor:
    """Round to bfloat16 if the CPU has instructions for it."""
    return x.bfloat16().to(x.dtype) if multiplies_in_bfloat16() else x


def row_errors(rows: Tensor, expected: Tensor) -> Tensor:
    """Return the relative error of each row."""
    return (rows - expected).norm(dim=-1) / expected.norm(dim=-1)


def call(function: str, *arguments: Any) -> None:
    """Call a function of native.c with tensors, whole numbers, numbers and None."""
    types = {int: c_long, float: c_float, type(None): c_void_p}
    getattr(library(), function)(
        *(
            c_void_p(x.data_ptr()) if isinstance(x, Tensor) else types[type(x)](x)
            for x in arguments
        )
    )


@pytest.mark.usefixtures("attention_in_bfloat16")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ALL_MODELS)
def test_logits_are_those_of_pytorchs_operations(
    monkeypatch: pytest.MonkeyPatch, name: str, batch: int, dtype: str
) -> None:
    lm = rounded_model(name, dtype)
    native_decoder(lm)
    fast = logits(lm, batch)
    monkeypatch.setattr(native, "has_operations", lambda config: False)
    assert type(Target(lm, batch=1, capacity=8).fused) is not NativeDecoder
    # Rows in float32 have other last bits, and so some keys and values other steps of bfloat16.
    limit = 1e-5 if dtype == "int8" or multiplies_in_bfloat16() else 1e-3
    for ours, theirs in zip(fast, logits(lm, batch)):
        errors = row_errors(ours, theirs)
        # In few rows a last bit becomes a whole step of int8 in a later layer.
        assert errors.median() < limit and errors.max() < 0.05


@pytest.mark.parametrize("name", ALL_MODELS)
def test_attention_in_bfloat16_is_as_far_from_float32_as_int8_is(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    lm = rounded_model(name, dtype)
    fast = logits(lm, 3)
    monkeypatch.setattr(native, "has_operations", lambda config: False)
    exact = logits(model_of(copy.deepcopy(ALL_MODELS[name]), packed=False), 3)
    for ours, theirs, wanted in zip(fast, logits(lm, 3), exact):
        error, limit = (row_errors(x, wanted).mean() for x in (ours, theirs))
        assert error < 1.5 * limit


@pytest.mark.usefixtures("attention_in_bfloat16")
@pytest.mark.parametrize("name", ["llama", "two query heads, 128 wide"])
def test_inputs_are_multiplied_by_their_factors(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By other factors than the weights are divided by, which changes the logits."""
    lm = rounded_model(name)
    before = logits(lm)
    for linear in linear_layers_in_int8(lm):
        shrink = linear.product.shrink
        shrink.copy_(torch.randint(-1, 2, shrink.shape).exp2())
    fast = logits(lm)
    monkeypatch.setattr(native, "has_operations", lambda config: False)
    for ours, theirs, without in zip(fast, logits(lm), before):
        assert row_errors(ours, theirs).median() < 1e-5
        assert row_errors(ours, without).min() > 0.2


def linear_layers_in_int8(lm: PreTrainedModel) -> list[RoundedLinear]:
    return [
        module for module in lm.model.modules() if isinstance(module, RoundedLinear)
    ]


def test_an_adapter_of_the_last_layer_alone_fits_the_buffers(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Bug: the buffers had the sizes of the first layer, and C wrote beyond them."""
    lm = rounded_model("llama", dtype, rank=256, within="layers.1.mlp")
    decoder = native_decoder(lm)
    last = decoder._c.layer[decoder._c.layers - 1]
    assert (
        decoder._outputs
        >= last.gate_up.w.outputs
        > decoder._c.layer[0].gate_up.w.outputs
    )
    fast = logits(lm, 1)
    monkeypatch.setattr(native, "has_operations", lambda config: False)
    for ours, theirs in zip(fast, logits(lm, 1)):
        assert row_errors(ours, theirs).median() < 0.05


@pytest.mark.usefixtures("attention_in_bfloat16")
@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("name", ["llama", "two query heads, 128 wide"])
def test_an_adapter_changes_probes_as_pytorchs_operations_do(
    monkeypatch: pytest.MonkeyPatch, name: str, rank: int, dtype: str
) -> None:
    """The trees of a batch differ in the numbers of drafts and of probes."""
    requests = [Request([5, 17, 9, 30]), Request([2, 44])]
    trees = [
        Tree((3, 9, 4, 11, 11), (-1, 0, 1, 2, 3), 3, (2,)),
        Tree((7, 11), (-1, 0), 1, (0,)),
    ]

    def rows(lm: PreTrainedModel) -> list[Tensor]:
        """Return the hidden states of drafts and of probes."""
        runner = Runner(lm, capacity=60, max_rows=8, batch=2)
        runner.prefill([request.prompt for request in requests])
        flat, hidden = runner._dynamic.hidden(trees)
        return [hidden[:, : flat.drafts], hidden[:, flat.drafts :]]

    lm = rounded_model(name, dtype, rank)
    adapted = rows(lm)
    base = rows(rounded_model(name, dtype))
    assert torch.equal(adapted[0], base[0])
    assert (adapted[1] - base[1]).norm() > 0.1 * base[1].norm()
    monkeypatch.setattr(native, "has_operations", lambda config: False)
    for ours, theirs in zip(adapted, rows(lm)):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize(
    "name",
    ["llama", "qwen2, a window in the second layer", "two query heads, 128 wide"],
)
def test_a_prompts_rows_are_the_same_on_several_threads_and_beside_others(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    lm = rounded_model(name, dtype, rank=4)
    prompts = [list(range(30)), list(range(40, 57))]
    tree = Tree((3, 9, 4, 1), (-1, 0, 0, 2), 3, (2,))

    def after(prompts: list[list[int]]) -> Tensor:
        runner = Runner(lm, capacity=60, max_rows=8, batch=len(prompts))
        runner.prefill(prompts)
        requests = [Request(prompt) for prompt in prompts]
        output = runner.forward([tree] * len(prompts), requests, GREEDY)
        return output.logits.whole()

    alone = torch.cat([after([prompt]) for prompt in prompts])
    assert torch.equal(after(prompts), alone)
    monkeypatch.setattr(native, "DIVIDED", 1)
    with on_threads(2):
        assert torch.equal(after(prompts), alone)


@pytest.mark.parametrize("name", ALL_MODELS)
def test_rows_of_a_tree_are_those_of_a_row_at_a_time(name: str, dtype: str) -> None:
    """Rows of a tree attend to the prompt together, and to the nodes of their paths each on its own.

    Tiles add the values of the first 256 tokens at once.
    """
    lm = rounded_model(name, dtype)
    prompt = [i % 97 for i in range(277)]
    rng = random.Random(0)
    parents = [-1, *(rng.randrange(max(0, i - 6), i) for i in range(1, 30))]
    tokens = [rng.randrange(97) for _ in parents]
    runner = Runner(lm, capacity=340, max_rows=len(tokens))
    runner.prefill([prompt])
    tree = Tree(tuple(tokens), tuple(parents), len(tokens))
    _, together = runner._dynamic.hidden([tree])
    for last in (29, 17, 3):
        path = [last]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        runner.prefill([prompt])
        for node in path:
            _, alone = runner._dynamic.hidden([Tree((tokens[node],), (-1,), 1)])
            runner.commit([[0]])
        assert torch.equal(together[0, last], alone[0, 0])


def test_a_norm_adds_the_product_and_rounds_its_rows() -> None:
    """h += y largest + bias, then the norm, as numbers from 1 to 255 and the largest of each row."""
    torch.manual_seed(0)
    norm = native_decoder(rounded_model("llama"))._layers[0].norms[0]
    assert isinstance(norm, RowNorm)
    h, y = torch.randn(2, 5, 48)
    largest, bias = torch.rand(5), torch.randn(48)
    total = h + y * largest[:, None] + bias
    normed, x = torch.empty(5, 48), torch.empty(5, 48, dtype=torch.uint8)
    product = y, 48, bias, norm.weight, norm.epsilon
    again = h.clone()
    call("add_norm", 5, 48, again, *product, normed, None, largest)
    call("add_norm", 5, 48, h, *product, None, x, largest)
    torch.testing.assert_close(h, total)
    assert torch.equal(again, h)
    torch.testing.assert_close(normed, norm(total))
    assert torch.equal(largest, normed.abs().amax(-1))
    scaled = normed * (MOST / largest)[:, None]
    assert torch.equal(x.float(), (scaled + (ZERO_POINT + 0.5)).floor())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_overflows_stays_in_its_row(value: float) -> None:
    h = torch.randn(4, 48)
    results = []
    for number in (1.0, value):
        h[2, 5] = number
        results.append(normed_rows(h.clone()))
    others = [0, 1, 3]
    assert not results[1][1][2].isfinite()
    for before, after in zip(*results):
        assert torch.equal(before[others], after[others])


def test_a_row_of_zeros_stays_zero() -> None:
    x, largest = normed_rows(torch.zeros(1, 48))
    assert largest == 0
    assert (x == ZERO_POINT).all()


def normed_rows(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of rows as a product's input, and the largest numbers."""
    n, d = h.shape
    x, largest = torch.empty(n, d, dtype=torch.uint8), torch.empty(n)
    weight = torch.ones(d)
    call("add_norm", n, d, h, None, 0, None, weight, 1e-5, None, x, largest)
    return x, largest


def test_an_activation_has_a_small_error_everywhere() -> None:
    """silu(g) u for g from -120 to 120; each row has one number, so that rounding does not change it."""
    gates = torch.linspace(-120, 120, 4001)
    n, largest = len(gates), torch.ones(len(gates))
    y = torch.zeros(n, 2 * LANES)
    y[:, 0], y[:, LANES] = gates, 1
    x = torch.empty(n, LANES, dtype=torch.uint8)
    rest = torch.zeros(2 * LANES), torch.ones(LANES), x, largest
    call("activate", n, LANES, y, 2 * LANES, *rest)
    expected = torch.nn.functional.silu(gates)
    torch.testing.assert_close(largest, expected.abs(), atol=1e-7, rtol=1e-6)
    rounded = ZERO_POINT + MOST * expected.sign()
    clear = expected.abs() > 1e-30
    assert torch.equal(x[clear, 0].float(), rounded[clear])


def test_without_a_compiler_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc -m64")
    assert library.__wrapped__() is None
    monkeypatch.setattr("conf.devices.int8.library", lambda: None)
    monkeypatch.setattr(rounded, "bfloat16_kernel", lambda: None)
    with caplog.at_level(logging.WARNING):
        exact_kernel.__wrapped__()
        assert not to_bfloat16(tiny_llama().bfloat16(), ENOUGH)
    for line, dtype in zip(caplog.messages, ("int8", "bfloat16"), strict=True):
        assert line.startswith(f"dtype={dtype} is at most half as fast without a C")
        assert "/nowhere/cc could not compile native.c. Install gcc" in line


def test_other_activations_and_widths_take_pytorchs_operations() -> None:
    lm = rounded_model("llama")
    lm.config.hidden_act = "gelu"
    assert type(Target(lm, batch=1, capacity=8).fused) is not NativeDecoder
    lm.config.hidden_act = "silu"
    lm.config.head_dim = 12
    gate = native_decoder(rounded_model("llama"))._gate
    assert type(native.decoder_of(lm, gate, wide=True)) is not NativeDecoder
