"""Test that the fused decoder equals the library's bit for bit in float32."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
)
from transformers.models.llama.modeling_llama import rotate_half

from infer.engine import fused
from infer.engine.forward import Target
from infer.engine.fused import RotaryTables, RowNorm, activated, fuse_rotary, rotate
from infer.engine.output import Request
from infer.engine.packed import TYPES, pack
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.trees.tree import Tree
from tests.conftest import on_threads

pytestmark = pytest.mark.skipif(
    torch.float32 not in TYPES, reason="this PyTorch has no oneDNN"
)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "one key head for each query head, biases": LlamaConfig(
        **SIZES | {"num_key_value_heads": 4}, attention_bias=True, mlp_bias=True
    ),
    "qwen2, a window in the second layer": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=10, max_window_layers=1
    ),
    "mistral, a window in all": MistralConfig(**SIZES, sliding_window=12),
    "llama, other heads": LlamaConfig(**SIZES | {"head_dim": 32}),
}


def model_of(
    config: Any, dtype: torch.dtype = torch.float32, *, packed: bool = True
) -> PreTrainedModel:
    """Return a random model that is packed as a loaded one."""
    torch.manual_seed(0)
    lm: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter in lm.parameters():  # norms and biases too
        parameter.data += 0.1 * torch.randn_like(parameter)
    if packed:
        pack(lm, 1 << 30)
    fuse_rotary(lm)
    return lm


def logits(lm: PreTrainedModel, batch: int = 1) -> list[Tensor]:
    """Return the logits of a prompt's trees, of one row and of several."""
    prompts = [list(range(7, 20 + b)) for b in range(batch)]
    requests = [Request(prompt) for prompt in prompts]
    trees = [Tree((3, 9, 4, 11), (-1, 0, 0, 1), 4), Tree.chain(5, [6])]
    runner = Runner(lm, capacity=60, max_rows=8, batch=batch)
    runner.prefill(prompts)
    results = []
    for tree in trees:
        output = runner.forward([tree] * batch, requests, GREEDY)
        results.append(output.logits.whole())
        runner.commit([[0]] * batch)
    return results


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_float32_has_the_librarys_bits(
    monkeypatch: pytest.MonkeyPatch, name: str, batch: int, threads: int
) -> None:
    with on_threads(threads):
        lm = model_of(MODELS[name])
        assert Target(lm, batch=1, capacity=8).fused is not None
        fast = logits(lm, batch)
        monkeypatch.setattr(fused, "DECODERS", {})
        assert Target(lm, batch=1, capacity=8).fused is None
        for ours, theirs in zip(fast, logits(lm, batch)):
            assert torch.equal(ours, theirs)


def test_a_rotation_is_the_librarys() -> None:
    x, cos, sin = torch.randn(3, 1, 5, 16)
    first, second = sin.chunk(2, -1)
    signed = torch.cat([-first, second], -1)
    assert torch.equal(rotate(x, cos, signed), x * cos + rotate_half(x) * sin)


@pytest.mark.parametrize("d", [48, 576, 899])
def test_a_row_norm_is_pytorchs_and_independent_of_other_rows(d: int) -> None:
    torch.manual_seed(d)
    norm = nn.RMSNorm(d, eps=1e-5).requires_grad_(False)
    norm.weight.normal_()
    norm.variance_epsilon = norm.eps
    h = torch.randn(1, 40, d) * torch.logspace(-4, 3, 40)[:, None]
    ours = RowNorm(norm)(h)
    torch.testing.assert_close(ours, norm(h), rtol=2e-6, atol=0)
    for rows in (1, 2, 9):
        assert torch.equal(RowNorm(norm)(h[:, 7 : 7 + rows]), ours[:, 7 : 7 + rows])


def test_tables_hold_the_librarys_cosines_and_grow() -> None:
    lm = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    rotary = lm.model.rotary_emb
    fuse_rotary(lm)
    tables = lm.model.rotary_emb
    assert type(tables) is RotaryTables
    x = torch.empty(0)
    for positions in ([[0, 1, 5]], [[2500, 3, 1023]], [[1024, 2047, 2048]]):
        ids = torch.tensor(positions)
        for ours, theirs in zip(tables(x, ids), rotary(x, ids)):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert tables(x.double(), torch.tensor([[4]]))[0].dtype == torch.float64


def test_a_rotation_that_depends_on_the_length_has_no_table() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    lm = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, rope_parameters=scaling))
    rotary = lm.model.rotary_emb
    fuse_rotary(lm)
    assert lm.model.rotary_emb is rotary


def test_a_gpu_keeps_the_librarys_rotation() -> None:
    """Bug: the tables read a position from the device, so no CUDA graph could be captured.

    PyTorch's meta device stands for a GPU.
    """
    lm = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).to("meta")
    rotary = lm.model.rotary_emb
    fuse_rotary(lm)
    assert lm.model.rotary_emb is rotary


def test_other_forms_take_the_librarys_layers(llama: PreTrainedModel) -> None:
    assert Target(llama, batch=1, capacity=8).fused is None  # not packed
    lm = model_of(MODELS["llama"])
    lm.model.layers[1].mlp.up_proj = nn.Linear(48, 96)
    assert Target(lm, batch=1, capacity=8).fused is None


def test_changed_weights_count_from_the_next_text() -> None:
    lm = model_of(MODELS["llama"])
    before = logits(lm)
    with torch.no_grad():
        lm.model.layers[0].self_attn.v_proj.weight.mul_(2)
    after = logits(lm)
    assert not torch.equal(before[0], after[0])


def test_long_rows_are_activated_in_parts_of_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a thread may begin within a row, and the last bit of exp depends on the place."""
    monkeypatch.setattr(fused, "UNDIVIDED", 64)
    sizes = []

    def activation(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return F.silu(x)

    x = torch.randn(1, 5, 32)
    assert torch.equal(activated(activation, x), F.silu(x))
    assert sizes == [64, 64, 32]
