"""Compare the faster peft layers with peft's own."""

from typing import Any

import pytest
import torch
from peft.tuners.lora import Linear
from transformers import AutoConfig, AutoModelForCausalLM

from tests.train.test_attention import L, random_layout
from train import lora
from train.adapter_layers import LowRankLinear
from train.attention import register
from train.config import LoraSettings
from train.data import to_tensors
from train.lora import Gate, adapt
from train.model import AdaptiveLM

ADAPTIVE = (45, 46, 47)
SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def module(dtype: torch.dtype, **settings: Any) -> AdaptiveLM:
    """Return a Qwen2, which has biases, with a random adapter of rank 4."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **SHAPE)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=register("sdpa"))
    lm = lm.to(dtype)
    adapt(lm, LoraSettings(rank=4, alpha=6, **settings), adaptive=ADAPTIVE)
    for name, parameter in lm.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    gate = Gate(lm) if settings.get("gated") else None
    return AdaptiveLM(lm, chunk=7, L=L, gate=gate)


def gradients(model: AdaptiveLM) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)  # seeds dropout
    batch = to_tensors(random_layout(adaptive=ADAPTIVE), torch.device("cpu"))
    loss, *_ = model(**batch)
    loss.backward()
    trained = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return trained | {"loss": loss.detach()}


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_loss_and_gradients_equal_pefts(
    gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = gradients(module(torch.float32, gated=gated))
    monkeypatch.setattr(lora, "use_fewer_operations", lambda lm: None)
    reference = gradients(module(torch.float32, gated=gated))
    assert result.keys() == reference.keys() and any("tokens" in n for n in result)
    for name, expected in reference.items():
        scale = expected.abs().max()
        torch.testing.assert_close(
            result[name] / scale, expected / scale, rtol=1e-4, atol=1e-5
        )


def test_bfloat16_error_is_no_larger_than_pefts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = gradients(module(torch.bfloat16, gated=True).float())
    fast = gradients(module(torch.bfloat16, gated=True))
    monkeypatch.setattr(lora, "use_fewer_operations", lambda lm: None)
    reference = gradients(module(torch.bfloat16, gated=True))

    def error(result: dict[str, torch.Tensor]) -> float:
        parts = [(result[n].float() - g).norm() / g.norm() for n, g in exact.items()]
        return float(torch.stack(parts).mean())

    assert error(fast) < 1.1 * error(reference) < 0.1


def test_with_dropout_pefts_forward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    result = gradients(module(torch.float32, dropout=0.5))
    monkeypatch.setattr(lora, "use_fewer_operations", lambda lm: None)
    torch.testing.assert_close(result, gradients(module(torch.float32, dropout=0.5)))


def test_with_hooks_pefts_forward_runs() -> None:
    """ZeRO 3 gathers the weights of a layer in a hook before its forward."""
    model = module(torch.float32)
    layers = [m for m in model.modules() if isinstance(m, LowRankLinear)]
    assert len(layers) == 14 and all(layer._is_plain() for layer in layers)
    called = []
    layers[0].lora_A["default"].register_forward_pre_hook(
        lambda *args: called.append(args)
    )
    gradients(model)
    assert called and isinstance(layers[0], Linear)
