"""Test LoRA: which weights are trained, and that the base model does not change."""

from typing import Any

import numpy as np
import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM

from conf.architecture import skeleton
from conf.errors import UserError
from tests.train.test_attention import L, model, random_layout
from train.config import LoraSettings, OptimizerConfig
from train.data import to_tensors
from train.head import PreviousTokenHead
from train.lora import (
    Gate,
    adapt,
    default_targets,
)
from train.model import AdaptiveLM
from train.objective import IGNORE, Layout, branch, causal
from train.optimizer import build_optimizer, parameter_groups

ADAPTIVE = (45, 46, 47)
CPU = torch.device("cpu")


def branch_layout(*, seed: int = 0) -> Layout:
    return random_layout(adaptive=ADAPTIVE, seed=seed)


def base_model(
    *, dtype: torch.dtype = torch.float32, tied: bool = False
) -> LlamaForCausalLM:
    lm = model("sdpa").lm.to(dtype)
    if tied:
        lm.config.tie_word_embeddings = True
        lm.lm_head.weight = lm.model.embed_tokens.weight
    return lm


def adapted(config: LoraSettings, **kind: Any) -> AdaptiveLM:
    lm = base_model(**kind)
    adapt(lm, config, adaptive=ADAPTIVE)
    return AdaptiveLM(lm, chunk=7, L=L, gate=Gate(lm) if config.gated else None)


def train(module: AdaptiveLM) -> None:
    """Take three large steps on two layouts."""
    optimizer = torch.optim.AdamW(parameter_groups(module, OptimizerConfig()), lr=0.02)
    for step in range(3):
        loss, *_ = module(**to_tensors(branch_layout(seed=step % 2), CPU))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_new_head_changes_no_prediction() -> None:
    """W2 is zero at the start, so tally and tokens stay the same; its gradient is not zero."""
    module = adapted(LoraSettings(rank=4, gated=True))
    batch = to_tensors(branch_layout(), CPU)
    without = module(**batch)
    module.head = PreviousTokenHead(module.lm.config.hidden_size, torch.float32)
    with_head = module(**batch)
    loss, *results = with_head
    for result, expected in zip(results, without[1:], strict=True):
        torch.testing.assert_close(result, expected)
    loss.backward()
    assert module.head.w2.weight.grad.abs().sum() > 0


def test_a_target_that_is_not_trained_is_refused() -> None:
    """Bug: an adapter of the output head was accepted but never trained.

    The loss reads the weight of the base model's head.
    """
    with pytest.raises(UserError, match="lm_head must be .* got its head"):
        adapt(base_model(), LoraSettings(rank=2, targets=["lm_head"]), adaptive=())


MIXTURE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
}


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("experts", "a part of its mixture of experts"),
        ("mlp.experts.down_proj", "a part of its mixture of experts"),
        ("gate_proj", "a part of its mixture of experts"),
        ("gate", "a part of its mixture of experts"),
        ("wq", "which it does not have"),
        ("input_layernorm", "which is another kind of layer"),
    ],
)
def test_experts_have_no_adapter_and_are_refused_as_targets(
    target: str, reason: str
) -> None:
    """Bug: an unusable target was ignored silently if another target existed."""
    config = AutoConfig.for_model("qwen3_moe", **MIXTURE)
    lm = skeleton(config)
    with pytest.raises(UserError, match=f"got {target}, {reason}"):
        adapt(lm, LoraSettings(rank=2, targets=["q_proj", target]), adaptive=())
    adapt(lm, LoraSettings(rank=2), adaptive=())
    layers = {name for name, m in lm.named_modules() if isinstance(m, LoraLayer)}
    words = {name.rpartition(".")[2] for name in layers}
    assert words == {"q_proj", "k_proj", "v_proj", "o_proj"} and len(layers) == 8


def test_the_expansion_of_latents_has_no_adapter() -> None:
    """It computes the keys of all cached tokens, so a gate could not restrict it to probes."""
    sizes = {"num_hidden_layers": 1, "vocab_size": 64}
    lm = skeleton(AutoConfig.for_model("deepseek_v3", **sizes))
    with pytest.raises(UserError, match="got kv_b_proj, which computes from the cache"):
        adapt(lm, LoraSettings(rank=2, targets=["kv_b_proj"]), adaptive=())
    names = default_targets(lm)
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa" in names
    assert not any(name.endswith("kv_b_proj") for name in names)


def test_layers_that_are_not_linear_are_refused() -> None:
    """Decoding has no adapter for GPT-2's Conv1D layers."""
    lm = skeleton(AutoConfig.for_model("gpt2", n_layer=1, vocab_size=64))
    with pytest.raises(UserError, match="lora.rank must be 0 for gpt2, .* Conv1D"):
        adapt(lm, LoraSettings(rank=2), adaptive=())


def test_muon_without_parameters_for_adamw() -> None:
    """Bug: AdamW raised an error if all trained parameters were matrices."""
    config = OptimizerConfig(name="muon")
    layer = torch.nn.Linear(2, 2, bias=False)
    layer(torch.ones(2)).sum().backward()
    before = layer.weight.clone()
    build_optimizer(parameter_groups(layer, config), config).step()
    assert not torch.equal(layer.weight, before)


def hidden_and_tally(module: AdaptiveLM, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the last hidden states (r, c, d) and the tally of a forward."""
    batch = to_tensors(layout, CPU)
    with torch.no_grad():
        hidden = module.encode(
            batch["ids"], batch["offsets"], batch["positions"], batch["trunk"]
        )
        return hidden, module(**batch)[1]


@pytest.mark.parametrize(
    ("dtype", "tied"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)],
    ids=str,
)
def test_with_a_gate_clean_rows_equal_the_base_model_bit_for_bit(
    dtype: torch.dtype, tied: bool
) -> None:
    """With tied embeddings, peft also trains the head's row of an adaptive id.

    That would change the loss of every standard token, so the head must be untied.
    """
    layout = branch_layout(seed=5)
    n = layout.trunk
    base = AdaptiveLM(base_model(dtype=dtype, tied=tied), chunk=7, L=L)
    module = adapted(LoraSettings(rank=4, gated=True), dtype=dtype, tied=tied)
    clean = layout.ids[:, :n]
    standard = causal(clean, np.zeros_like(clean))
    hidden, _ = hidden_and_tally(base, standard)
    untrained, _ = hidden_and_tally(module, layout)
    train(module)
    trained, tally = hidden_and_tally(module, layout)
    assert torch.equal(untrained[:, :n], hidden)
    assert torch.equal(trained[:, :n], hidden)
    assert torch.equal(tally[0], hidden_and_tally(base, layout)[1][0])
    assert not torch.isclose(trained[:, n:], untrained[:, n:]).any(dim=-1).all()


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_only_the_adapter_learns(gated: bool) -> None:
    module = adapted(LoraSettings(rank=4, gated=gated))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    train(module)
    for name, parameter in module.named_parameters():
        learns = "lora_" in name or "trainable_tokens_delta" in name
        assert learns == parameter.requires_grad == (parameter.grad is not None), name
        assert torch.equal(parameter, before[name]) != learns, name


def test_a_batch_without_windows_has_zero_gradient() -> None:
    """Bug: training stopped with "loss must be a scalar tensor".

    A chat with a short answer had no window, so no column used the adapter and the loss had
    no gradient.
    """
    tokens = np.arange(1, 13)[None]
    nothing = np.zeros_like(tokens)
    windows = [(np.array([3]), np.array([L]))]
    layout = branch(tokens, nothing, windows, nothing > 0, ADAPTIVE)
    module = adapted(LoraSettings(rank=4, gated=True))
    module(**to_tensors(layout, CPU))[0].backward()
    for parameter in module.parameters():
        assert not parameter.requires_grad or not parameter.grad.any()


def test_the_gate_equals_a_mask_on_the_adapters_input() -> None:
    """In the slow reference every row passes through A and B; standard tokens are set to zero."""
    layout = branch_layout()
    mask = torch.from_numpy(layout.offsets > 0)[..., None]
    # Standard tokens pass only through frozen weights, so they have no loss.
    layout.labels[layout.offsets == 0] = IGNORE
    gradients = []
    for gated in (True, False):
        module = adapted(LoraSettings(rank=4, gated=gated))
        generator = torch.Generator().manual_seed(1)
        for name, child in module.named_modules():
            if name.endswith("lora_B.default"):
                child.weight.data.normal_(generator=generator)
            if name.endswith("lora_A.default") and not gated:
                child.register_forward_pre_hook(lambda _, args: (args[0] * mask,))
        module(**to_tensors(layout, CPU))[0].backward()
        gradients.append([p.grad for p in module.parameters() if p.requires_grad])
    torch.testing.assert_close(*gradients)
