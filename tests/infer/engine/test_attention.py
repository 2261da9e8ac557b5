"""Test that a view computes with the model's own weights and does not change the model."""

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn

from infer.engine.attention import ProbeGate, view_of
from infer.engine.families import check_tree
from infer.engine.gate import GatedLinear
from tests.infer.engine.test_families import FAMILIES, tiny, tiny_family

IDS = torch.tensor([[5, 17, 3, 88, 41, 22, 60, 9]])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_view_leaves_the_model_alone(family: str) -> None:
    lm = tiny_family(family)
    config = lm.config.to_dict()
    logits = lm(IDS).logits
    check_tree(lm)
    view = view_of(lm)
    assert lm.config.to_dict() == config and torch.equal(lm(IDS).logits, logits)
    for tensors in (nn.Module.parameters, nn.Module.buffers):
        assert all(a is b for a, b in zip(tensors(view), tensors(lm), strict=True))


def test_a_view_follows_the_weights() -> None:
    """The weights are cast, and one weight is replaced."""
    lm = tiny("llama")
    view = view_of(lm)
    lm.double()
    lm.lm_head.weight = nn.Parameter(2 * lm.lm_head.weight)
    torch.testing.assert_close(view(IDS).logits, lm(IDS).logits)


def test_every_view_has_a_gate_of_its_own() -> None:
    """Regression: two texts on one gated model shared a gate, which opened for the other's rows."""
    lm = tiny("llama")
    gate = ProbeGate()
    for layer in lm.model.layers:
        a, b = torch.randn(2, 32), torch.randn(64, 2)
        layer.mlp.up_proj = GatedLinear(layer.mlp.up_proj, a, b, 1.0, gate)
    views = [view_of(lm) for _ in range(2)]
    plain = lm(IDS).logits
    with ProbeGate.of(views[0]).open(0, IDS.shape[1]):
        assert torch.equal(lm(IDS).logits, plain)
        torch.testing.assert_close(views[1](IDS).logits, plain)
        assert (views[0](IDS).logits - plain).abs().max() > 0.1


class Timer:
    """Wraps a forward as accelerate does; its lock cannot be copied."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.lock = Lock()
        self.modules: list[Any] = []

    def timed(self, *args: Any, module: Any, **kwargs: Any) -> Any:
        with self.lock:
            self.modules.append(module)
        return self.forward(*args, **kwargs)


def test_a_wrapped_forward_is_the_views_own() -> None:
    """Regression: the model's own module was called, or copying the lock failed."""
    lm = tiny("llama")
    logits = lm(IDS).logits
    attention = lm.model.layers[0].self_attn
    timer = Timer(attention.forward)
    attention.forward = partial(timer.timed, module=attention)
    view = view_of(lm)
    torch.testing.assert_close(view(IDS).logits, logits)
    assert timer.modules == [view.model.layers[0].self_attn] != [attention]
