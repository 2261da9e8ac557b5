"""A view computes with the model's own weights and changes nothing of the model."""

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import PreTrainedModel

from infer.engine.attention import ProbeGate, biased, view_of
from infer.engine.families import check_tree
from infer.engine.forward import context_length, windows
from infer.engine.gate import GatedLinear
from infer.trees.tree import Tree, flatten, key_positions, mask
from tests.infer.engine.test_families import FAMILIES, tiny

IDS = torch.tensor([[5, 17, 3, 88, 41, 22, 60, 9]])


def attributes_of(lm: PreTrainedModel) -> list[dict[str, Any]]:
    """Every module's attributes, and a copy of what is in its dictionaries."""
    return [
        {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(module).items()
        }
        for module in lm.modules()
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_view_computes_the_same_and_leaves_the_model_alone(family: str) -> None:
    """A decoder changed the attention of a model that other threads computed with."""
    kind, settings = FAMILIES[family]
    lm = tiny(kind, **settings)
    before, said = attributes_of(lm), lm.config.to_dict()
    logits = lm(IDS).logits
    check_tree(lm)
    view = view_of(lm)
    if not any(windows(lm.config).values()):
        torch.testing.assert_close(view(IDS).logits, logits, rtol=1e-4, atol=1e-4)
    assert attributes_of(lm) == before and lm.config.to_dict() == said
    assert view.config._attn_implementation == "tree" != lm.config._attn_implementation
    for tensors in (nn.Module.parameters, nn.Module.buffers):
        assert all(
            mine is theirs
            for mine, theirs in zip(tensors(view), tensors(lm), strict=True)
        )


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize(
    "change",
    [
        lambda lm: lm.double(),
        lambda lm: lm.load_state_dict(
            {name: 2 * value for name, value in lm.state_dict().items()}
        ),
        lambda lm: setattr(lm.lm_head, "weight", nn.Parameter(2 * lm.lm_head.weight)),
        lambda lm: setattr(lm.model.norm.weight, "data", 2 * lm.model.norm.weight.data),
        lambda lm: register_parametrization(
            lm.model.layers[0].mlp.up_proj, "weight", Doubled()
        ),
        lambda lm: lm.model.layers[0].register_forward_hook(
            lambda module, args, output: 2 * output
        ),
    ],
    ids=["cast", "loaded", "a new parameter", "new data", "parametrized", "hooked"],
)
def test_a_view_follows_what_becomes_of_the_weights(change: Any) -> None:
    lm = tiny("llama")
    view, before = view_of(lm), lm(IDS).logits
    change(lm)
    after = lm(IDS).logits
    assert after.dtype != before.dtype or not torch.equal(after, before)
    torch.testing.assert_close(view(IDS).logits, after)


def test_every_view_has_a_gate_of_its_own() -> None:
    """Two texts at once on a gated model opened one gate, for each other's rows."""
    lm, gate = tiny("llama"), ProbeGate()
    for layer in lm.model.layers:
        up, a, b = (
            layer.mlp.up_proj,
            nn.Linear(32, 2, bias=False),
            nn.Linear(2, 64, bias=False),
        )
        layer.mlp.up_proj = GatedLinear(up, a.weight, b.weight, 1.0, gate)
    views = [view_of(lm) for _ in range(2)]
    gates = [ProbeGate.of(item) for item in (lm, *views)]
    assert len(set(map(id, gates))) == 3
    for item, own in zip((lm, *views), gates):
        layers = [
            module for module in item.modules() if isinstance(module, GatedLinear)
        ]
        assert len(layers) == 2 and all(layer.gate is own for layer in layers)
    plain = lm(IDS).logits
    with gates[1].open(0, IDS.shape[1]):
        assert torch.equal(lm(IDS).logits, plain)
        assert not torch.equal(views[0](IDS).logits, plain)
        torch.testing.assert_close(views[1](IDS).logits, plain)


class Timer:
    """What accelerate binds a forward to, beside the module; a lock cannot be copied."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward, self.lock, self.modules = forward, Lock(), list[Any]()

    def timed(self, *args: Any, module: Any = None, **kwargs: Any) -> Any:
        with self.lock:
            self.modules.append(module)
        return self.forward(*args, **kwargs)


@pytest.mark.parametrize(
    "bound",
    [lambda timer: timer.timed, lambda timer: partial(Timer.timed, timer)],
    ids=["method", "partial"],
)
def test_a_wrapped_forward_is_the_views_own_and_shares_the_rest(bound: Any) -> None:
    """The model's own module would have been called; what it was bound to was copied, so a lock was refused."""
    lm = tiny("llama")
    logits, attention = lm(IDS).logits, lm.model.layers[0].self_attn
    timer = Timer(attention.forward)
    attention.forward = partial(bound(timer), module=attention)
    view = view_of(lm)
    torch.testing.assert_close(view(IDS).logits, logits)
    assert timer.modules == [view.model.layers[0].self_attn] != [attention]


def test_two_rivals_and_a_child_behind_two_tokens() -> None:
    """With ALiBi. A root, its rivals, the child of the first: columns 2 to 5 hold positions 2, 3, 3, 4."""
    tree = Tree((5, 1, 2, 3), (-1, 0, 0, 1), 4)
    flat, lengths, no = flatten([tree], [2]), [2], -torch.inf
    at = torch.from_numpy(key_positions(flat, lengths, 6))
    assert at.tolist() == [[0, 1, 2, 3, 3, 4]]
    attends = torch.from_numpy(mask(flat, lengths, 6))
    (by_head,) = biased(attends, at, torch.tensor([1.0, 0.5]), torch.float32)
    assert by_head[0].tolist() == [
        [0, 1, 2, no, no, no],
        [0, 1, 2, 3, no, no],
        [0, 1, 2, no, 3, no],
        [0, 1, 2, 3, no, 4],
    ]
    assert torch.equal(by_head[1], by_head[0] / 2)


def test_the_context_is_what_the_model_was_trained_on() -> None:
    """ALiBi has no table of positions to read it off."""
    config = tiny("bloom").config
    assert context_length(config) == 2048
    config.seq_length = 512
    assert context_length(config) == 512
    assert context_length(tiny("opt").config) == 128
