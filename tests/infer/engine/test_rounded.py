"""Test layers in int8 and bfloat16: values, rows that do not depend on other rows, texts equal with drafts."""

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from conf.devices.bfloat16 import bfloat16_kernel
from conf.devices.int8 import Kernel, exact_kernel
from conf.devices.int8 import pack as pack_weight
from conf.errors import UserError
from infer import DecodeConfig, Model, generate, load
from infer.engine import native, rounded
from infer.engine.attention import ProbeGate
from infer.engine.fused import UNDIVIDED
from infer.engine.gate import GatedLinear
from infer.engine.output import Request
from infer.engine.packed import TYPES, dtype_of, pack, rounded_type
from infer.engine.rounded import (
    RoundedHead,
    RoundedLinear,
    RoundedProduct,
    RowActivation,
    to_bfloat16,
    to_int8,
)
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.models.draft import first_layers
from infer.trees.tree import Tree
from tests.conftest import tiny_llama
from tests.infer.engine.test_families import tiny_family
from tests.infer.gated import adapted_copy

pytestmark = pytest.mark.skipif(
    exact_kernel() is None, reason="products in int8 are not exact on this CPU"
)
NATIVE = pytest.mark.skipif(
    bfloat16_kernel() is None, reason="no AVX2, or no C compiler"
)
BOTH = pytest.mark.parametrize(
    "dtype", ["int8", pytest.param("bfloat16", marks=NATIVE)]
)
ENOUGH = 1 << 40  # bytes


def round_model(lm: Any, dtype: str) -> None:
    """Round a float32 model to int8 or bfloat16."""
    if dtype == "int8":
        to_int8(lm)
    else:
        assert to_bfloat16(lm.bfloat16(), ENOUGH)


@pytest.fixture(scope="module")
def int8() -> LlamaForCausalLM:
    lm = tiny_llama()
    to_int8(lm)
    return lm


@pytest.fixture(scope="module")
def gated_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an adapter on every layer."""
    return adapted_copy(model_dir, tmp_path_factory.mktemp("rounded") / "gated")


def int8_of(linear: nn.Linear) -> RoundedLinear:
    """Return the layer in int8 alone."""
    layer = RoundedLinear(linear)
    RoundedProduct({layer: None}, exact_kernel())
    return layer


def test_a_product_is_that_of_rounded_numbers() -> None:
    """Worked example: 127 levels on each side of 0; a scale for each row of both factors."""
    linear = nn.Linear(4, 2)
    with torch.no_grad():
        linear.weight[:] = torch.tensor([[1.27, -0.5, 0.004, 0], [0, 0, 2, -2]])
        linear.bias[:] = torch.tensor([1, 0])
    x = torch.tensor([[127.0, 1.4, -1.6, 0], [0, 0, 0, 0], [0, 0, 0.5, 0.5]])
    # The first row of weights has steps of 0.01, of x steps of 1: 127, 1, -2, 0.
    expected = [[1.27 * 127 - 0.5, -2.0 * 2], [0, 0], [0, 0]]
    with torch.inference_mode():
        y = int8_of(linear)(x) - torch.tensor([1, 0])
    torch.testing.assert_close(y, torch.tensor(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [1, 2, 5, 9, 16, 33])
def test_a_row_is_the_same_beside_any_others(rows: int) -> None:
    torch.manual_seed(0)
    layer = int8_of(nn.Linear(96, 80))
    x = 3 * torch.randn(40, 96)
    with torch.inference_mode():
        alone = torch.cat([layer(row[None]) for row in x])
        shuffled = torch.randperm(40)[:rows]
        assert torch.equal(layer(x[shuffled]), alone[shuffled])


def test_errors_stay_below_a_fiftieth_of_the_product() -> None:
    """Groups of four columns (AVX2) leave weights about 80 levels if they are normally distributed."""
    torch.manual_seed(0)
    linear = nn.Linear(256, 128)
    nn.init.normal_(linear.weight, std=0.02)
    x = torch.randn(50, 256)
    with torch.inference_mode():
        expected = linear(x)
        difference = int8_of(linear)(x) - expected
    assert difference.norm() / expected.norm() < 0.02


def test_activations_outside_the_fused_decoder_have_rows_of_their_own() -> None:
    """Bug: beside eight rows an activation had other last bits, which int8 may round to a whole step."""
    lm = tiny_family("qwen3")
    to_int8(lm)
    assert all(isinstance(layer.mlp.act_fn, RowActivation) for layer in lm.model.layers)
    sizes = []

    class Activation(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes.append(x.numel())
            return x

    x = torch.randn(1, 9, UNDIVIDED // 3)
    assert torch.equal(RowActivation(Activation())(x), x)
    assert len(sizes) == 3 and max(sizes) <= UNDIVIDED


def test_values_that_overflow_stay_in_their_row() -> None:
    layer = int8_of(nn.Linear(32, 8))
    x = torch.randn(4, 32)
    with torch.inference_mode():
        expected = layer(x)
        for value in (float("nan"), float("inf")):
            x[2, 5] = value
            y = layer(x)
            assert not y[2].isfinite().all()
            assert torch.equal(y[[0, 1, 3]], expected[[0, 1, 3]])


def test_an_adapter_acts_on_probes_alone() -> None:
    torch.manual_seed(0)
    gate = ProbeGate()
    lm = nn.Module()
    a, b = torch.randn(3, 24), torch.randn(16, 3)
    lm.layer = GatedLinear(nn.Linear(24, 16), a, b, 0.5, gate)
    packed = copy.deepcopy(lm)
    base = RoundedLinear(packed.layer.base)
    packed.layer.base = base
    RoundedProduct({base: (packed.layer.a, packed.layer.b)}, exact_kernel())
    gates = [gate, ProbeGate.of(packed)]
    x = torch.randn(1, 6, 24)
    with torch.inference_mode():
        without = packed.layer(x)
        with gates[0].open(4, 6), gates[1].open(4, 6):
            expected, actual = lm.layer(x), packed.layer(x)
    assert torch.equal(actual[:, :4], without[:, :4])
    torch.testing.assert_close(actual, expected, atol=0.1, rtol=0.05)


def test_the_head_keeps_its_weight_and_the_other_layers_their_shapes(
    int8: LlamaForCausalLM,
) -> None:
    assert (
        type(int8.lm_head) is RoundedHead and int8.lm_head.weight.device.type == "cpu"
    )
    layer = int8.model.layers[0].mlp.up_proj
    assert type(layer) is RoundedLinear
    assert layer.weight.device.type == "meta" and layer.weight.shape == (64, 32)
    assert int8.num_parameters() == tiny_llama().num_parameters()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("others", [0, 2, 8, 17])
def test_logits_of_a_place_are_the_same_in_every_forward(
    monkeypatch: pytest.MonkeyPatch,
    int8: LlamaForCausalLM,
    others: int,
    compiled: bool,
) -> None:
    """A row has the same bits if its keys are in other columns and other rows are beside it."""
    if not compiled:
        monkeypatch.setattr(native, "has_operations", lambda config: False)
    check_places(int8, others)


@pytest.mark.skipif(torch.bfloat16 not in TYPES, reason="no kernels of bfloat16")
@pytest.mark.parametrize("others", [0, 17])
def test_logits_in_bfloat16_too_by_fixed_numbers_of_rows(
    monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    lm = tiny_llama().bfloat16()
    pack(lm, 1 << 30)
    check_places(lm, others)


@pytest.mark.parametrize("family", ["qwen2, windows above", "qwen3", "opt, projected"])
def test_logits_of_other_families_too(family: str) -> None:
    """Families that use the library's layers, and a family with a sliding window."""
    lm = tiny_family(family)
    to_int8(lm)
    check_places(lm, 8)


@NATIVE
def test_a_model_in_bfloat16_computes_in_float32_between_products() -> None:
    """Its logits are nearer to the logits of the same weights in float32 than PyTorch's are."""
    lm = tiny_family("qwen2, windows above").bfloat16()
    for layer in lm.model.layers:
        nn.init.normal_(layer.self_attn.q_proj.bias)
    ids = torch.tensor([[3, 14, 15, 9, 26, 5]])
    with torch.inference_mode():
        exact = copy.deepcopy(lm).float()(ids).logits
        error = (lm(ids).logits - exact).norm()
        assert to_bfloat16(lm, ENOUGH)
        assert (lm(ids).logits - exact).norm() < 0.8 * error
    weights = [lm.lm_head.weight, lm.get_input_embeddings().weight]
    assert all(weight.dtype == torch.bfloat16 for weight in weights)
    assert lm.model.norm.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("qwen2_moe, windows", {}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"head_dim": 12}),
    ],
)
def test_other_models_in_bfloat16_keep_pytorchs_products(
    family: str, changes: dict[str, Any]
) -> None:
    lm = tiny_family(family).bfloat16()
    for name, value in changes.items():
        setattr(lm.config, name, value)
    assert not to_bfloat16(lm, ENOUGH)
    assert all(p.dtype == torch.bfloat16 for p in lm.parameters())


@NATIVE
def test_weights_that_exceed_the_memory_stay_in_their_files() -> None:
    """Bug: a model that was larger than the free memory, and slow, ended the process."""
    lm = tiny_llama().bfloat16()
    layers = [layer for layer in lm.modules() if isinstance(layer, nn.Linear)]
    size = sum(layer.weight.nbytes for layer in layers)
    assert not to_bfloat16(lm, size - 1) and to_bfloat16(lm, size)


@BOTH
def test_a_weight_is_freed_when_its_product_is_packed(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Bug: all weights stayed until the last one was packed, in twice the memory."""
    lm = tiny_llama()
    weights = [weakref.ref(layer.self_attn.o_proj.weight) for layer in lm.model.layers]
    alive = []

    def packed(weight: torch.Tensor, kernel: type[Kernel]) -> Kernel:
        alive.append(sum(weight() is not None for weight in weights))
        return pack_weight(weight, kernel)

    monkeypatch.setattr(rounded, "pack", packed)
    round_model(lm, dtype)
    assert alive[0] == len(weights) and alive[-1] == 0


def test_models_in_float32_keep_their_products() -> None:
    assert not to_bfloat16(tiny_llama(), ENOUGH)


def test_experts_are_refused() -> None:
    """The products of experts depend on the number of rows that choose them."""
    with pytest.raises(UserError, match="got int8: qwen2_moe has .* Set dtype=float32"):
        to_int8(tiny_family("qwen2_moe, windows"))


def check_places(lm: PreTrainedModel, others: int) -> None:
    """Compare a path's logits, row by row, with its logits in a tree of more nodes."""
    prompt = [3, 14, 15, 9, 26]
    path = [5, 35, 8]
    expected = []
    runner = Runner(lm, capacity=40, max_rows=40)
    runner.prefill([prompt])
    for token in path:
        output = runner.forward([Tree.chain(token)], [Request(prompt)], GREEDY)
        expected.append(output.logits[:1].whole())
        runner.commit([[0]])
    # The path's nodes are the root, the last one below it, and a child of that.
    rivals = list(range(40, 40 + others))
    tokens = (path[0], *rivals, path[1], path[2])
    parents = (-1, *[0] * others, 0, others + 1)
    runner.prefill([prompt])
    tree = Tree(tokens, parents, len(tokens))
    logits = runner.forward([tree], [Request(prompt)], GREEDY).logits.whole()
    assert torch.equal(logits[[0, others + 1, others + 2]], torch.cat(expected))


@pytest.mark.parametrize("temperature", [0, 0.8])
@BOTH
def test_texts_are_plain_decodings(
    gated_dir: Path, dtype: str, temperature: float
) -> None:
    """For single prompts and batches, with every source of drafts."""
    gated = load(gated_dir, dtype, "cpu")
    assert dtype_of(gated.lm) == rounded_type(gated.lm) == dtype
    prompts = [[5, 17, 5, 17, 5], [30] * 20, [2, 44, 7]]
    plain = texts(gated, DecodeConfig("plain", temperature=temperature), prompts, 1)
    for decode in (
        DecodeConfig("hybrid", temperature=temperature),
        DecodeConfig("sdsat", k=3, temperature=temperature),
        DecodeConfig("prompt_lookup", temperature=temperature),
    ):
        for batch in (1, 3):
            assert texts(gated, decode, prompts, batch) == plain


@pytest.mark.skipif(torch.bfloat16 not in TYPES, reason="no kernels of bfloat16")
def test_texts_in_bfloat16_by_pytorch_are_plain_decodings(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounded, "bfloat16_kernel", lambda: None)
    model = load(model_dir, "bfloat16", "cpu")
    prompts = [[5, 17, 5, 17, 5], [30] * 20, [2, 44, 7]]
    plain = texts(model, DecodeConfig("plain"), prompts, 1)
    for batch in (1, 3):
        assert texts(model, DecodeConfig("hybrid"), prompts, batch) == plain


def texts(
    model: Model, decode: DecodeConfig, prompts: list[list[int]], batch: int
) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in prompts]
    decode.max_new_tokens = 40
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        seeds = list(range(first, first + len(part)))
        for step in generate(model, part, decode, seeds=seeds):
            result[first + step.sequence] += step.tokens
    return result


@BOTH
def test_draft_models_are_rounded_too(model_dir: Path, dtype: str) -> None:
    prompts = [[5, 17, 5, 17, 5]]
    plain = texts(load(model_dir, dtype, "cpu"), DecodeConfig("plain"), prompts, 1)
    for draft in ("self:1", str(model_dir)):
        model = load(model_dir, dtype, "cpu", draft=draft)
        assert model.draft is not None
        assert type(model.draft.lm.get_output_embeddings()) is RoundedHead
        assert texts(model, DecodeConfig("gsd", nodes=8), prompts, 1) == plain


def test_first_layers_share_the_integers(int8: LlamaForCausalLM) -> None:
    short = first_layers(int8, 1)
    assert short.model.layers[0].mlp.up_proj is int8.model.layers[0].mlp.up_proj
    assert short.lm_head is not int8.lm_head
    assert short.lm_head.product is int8.lm_head.product
