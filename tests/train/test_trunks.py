"""Test the cache of trunks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

from tests.train.test_attention import L, random_layout
from tests.train.test_lora import ADAPTIVE, base_model
from train.config import LoraSettings, ObjectiveConfig, TrainConfig
from train.data import to_tensors
from train.lora import Gate, adapt
from train.model import AdaptiveLM
from train.trunks import TrunkCache, trunk_cache

GATED = TrainConfig(
    lora=LoraSettings(rank=4, gated=True), objective=ObjectiveConfig(name="branch")
)


def trained_on(
    trunks: TrunkCache | None, seeds: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[torch.Tensor], int]:
    """Return the gradients after one layout for each seed, and the number of computed trunks.

    Each layout has two sequences.
    """
    lm = base_model()
    adapt(lm, GATED.lora, adaptive=ADAPTIVE)
    for name, parameter in lm.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    module = AdaptiveLM(lm, chunk=7, L=L, gate=Gate(lm), trunks=trunks)
    computed = 0
    frozen = module._frozen

    def counted(*args: Any) -> Any:
        nonlocal computed
        computed += 1
        return frozen(*args)

    monkeypatch.setattr(module, "_frozen", counted)
    for seed in seeds:
        layout = random_layout(adaptive=ADAPTIVE, seed=seed)
        module(**to_tensors(layout, torch.device("cpu")))[0].backward()
    return [p.grad for p in module.parameters() if p.grad is not None], computed


def test_a_cached_trunk_gives_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = [0, 1, 0]
    expected, passes = trained_on(None, seeds, monkeypatch)
    assert passes == 3
    cached, passes = trained_on(TrunkCache(2**20), seeds, monkeypatch)
    assert passes == 4  # one for each of the four sequences
    uncached, passes = trained_on(TrunkCache(0), seeds, monkeypatch)
    assert passes == 6
    torch.testing.assert_close(cached, expected, rtol=1e-4, atol=1e-5)
    # A resumed run has to compute trunks again that the uninterrupted run has cached.
    assert all(map(torch.equal, cached, uncached))


def test_the_cache_stays_within_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of 40 tokens a trunk has two layers' keys and values, 16 floats each, and 32 hidden."""
    size = 40 * 4 * (2 * 2 * 16 + 32)
    _, passes = trained_on(TrunkCache(2 * size), [0, 1, 0, 1], monkeypatch)
    assert passes == 2 + 2 + 2


def test_a_cache_needs_a_gated_adapter_and_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert trunk_cache(GATED) is not None
    assert trunk_cache(replace(GATED, trunk_cache=0)) is None
    assert trunk_cache(TrainConfig()) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert trunk_cache(GATED) is None


def test_a_trunk_has_no_dropout() -> None:
    """Bug: windows saw a base model with dropout in training, and without it in decoding."""
    lm = base_model()
    for layer in lm.model.layers:
        layer.self_attn.attention_dropout = 0.5
    adapt(lm, GATED.lora, adaptive=ADAPTIVE)
    module = AdaptiveLM(lm, chunk=7, L=L, gate=Gate(lm)).train()
    ids = torch.arange(12)[None]
    (first, keys), (second, _) = (
        module._frozen(ids, torch.arange(12)[None]) for _ in range(2)
    )
    assert torch.equal(first, second) and len(keys.by_layer) == len(lm.model.layers)
    assert module.training and lm.model.layers[0].training


def test_all_layers_share_one_compiled_graph() -> None:
    """Bug: model.compile=true compiled eight layers of a gated model separately, and left out the rest."""
    torch._dynamo.reset()
    lm = base_model()
    adapt(lm, GATED.lora, adaptive=ADAPTIVE)
    trunks = TrunkCache(2**20)
    module = AdaptiveLM(lm, chunk=7, L=L, gate=Gate(lm), trunks=trunks)
    batch = to_tensors(random_layout(adaptive=ADAPTIVE), torch.device("cpu"))
    expected, *_ = module(**batch)
    counter = CompileCounter()
    for layer in lm.model.layers:
        layer.compile(dynamic=True, backend=counter)
    with torch._dynamo.config.patch(error_on_recompile=True):
        loss, *_ = module(**batch)
    torch.testing.assert_close(loss, expected)
    assert counter.frame_count
