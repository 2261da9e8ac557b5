"""Trunks that are computed once."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import tiny_llama
from tests.train.test_attention import L, a_layout
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
    """Return the gradients of layouts of two sequences, and the trunks computed."""
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
        layout = a_layout(adaptive=ADAPTIVE, seed=seed)
        module(**to_tensors(layout, torch.device("cpu")))[0].backward()
    return [p.grad for p in module.parameters() if p.grad is not None], computed


def test_a_kept_trunk_gives_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = [0, 1, 0]
    expected, passes = trained_on(None, seeds, monkeypatch)
    assert passes == 3
    kept, passes = trained_on(TrunkCache(2**20), seeds, monkeypatch)
    assert passes == 4  # each of four sequences once
    alone, passes = trained_on(TrunkCache(0), seeds, monkeypatch)
    assert passes == 6
    torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-5)
    # A resumed run computes anew what the whole run had kept.
    assert all(map(torch.equal, kept, alone))


def test_no_more_is_kept_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trunk of 40 tokens: two layers' keys and values of 16 numbers, 32 hidden ones."""
    size = 40 * 4 * (2 * 2 * 16 + 32)
    _, passes = trained_on(TrunkCache(2 * size), [0, 1, 0, 1], monkeypatch)
    assert passes == 2 + 2 + 2


def test_trunks_are_kept_where_they_do_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lm = tiny_llama()
    assert trunk_cache(lm, GATED) is not None
    assert trunk_cache(lm, replace(GATED, trunk_cache=0)) is None
    assert trunk_cache(lm, TrainConfig()) is None
    lm.config.attention_dropout = 0.1
    assert trunk_cache(lm, GATED) is None
