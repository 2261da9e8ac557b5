"""Test the state of custom_generate between calls: runners, an adapter."""

import gc
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from infer.engine.gate import GatedLinear
from infer.engine.head import PreviousTokenHead
from infer.portable.custom_generate import state_of
from tests.infer.engine.test_families import tiny
from tests.infer.gated import write_adapter
from tests.infer.library import PROMPT, drafting, left_padded

ONE = torch.tensor([PROMPT])


def test_a_state_lasts_until_the_model_moves_or_is_freed() -> None:
    """Regression: the state referred to the model, so the model was never freed."""
    lm = tiny("llama")
    lm.generate = drafting(lm, 5)
    state = state_of(lm)
    for sample in (False, True):
        lm.generate(ONE, max_new_tokens=5, do_sample=sample)
    assert state_of(lm) is state
    lm.double()
    lm.generate(ONE, max_new_tokens=5, do_sample=False)
    assert state_of(lm) is not state
    del state
    gone = weakref.ref(lm)
    del lm
    gc.collect()
    assert gone() is None


def test_a_model_in_training_that_keeps_no_cache_is_refused() -> None:
    """Regression: the library disables the cache under gradient checkpointing, and tokens differed."""
    lm = tiny("llama")
    ours = drafting(lm, 5)
    ours(ONE, max_new_tokens=5)
    lm.gradient_checkpointing_enable()
    lm.train()
    with pytest.raises(ValueError, match="must be in evaluation mode, got training"):
        ours(ONE, max_new_tokens=5)


def test_it_drafts_with_the_adapter_and_writes_the_base_models_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loaded model stays the base model, and is freed with its state."""
    tiny("llama").save_pretrained(tmp_path / "model")
    folder = tmp_path / "model" / "adapter"
    write_adapter(tiny("llama"), folder, r=24, trainable_token_indices=[5])
    d = tiny("llama").config.hidden_size
    head = {"w1.weight": torch.randn(d, 2 * d), "w2.weight": torch.randn(d, d)}
    save_file(head, folder / "head.safetensors")
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ours = partial(drafting(lm, 5), gated=True)
    args = left_padded([PROMPT, [61, 62]]) | {"max_new_tokens": 20, "do_sample": False}
    for probes in ("root", "all", 2, "auto"):
        assert torch.equal(ours(**args, probes=probes), lm.generate(**args))
    gated = state_of(lm, gated=True).lm
    assert any(isinstance(module, GatedLinear) for module in gated.modules())
    assert PreviousTokenHead.of(gated)  # it drafted without
    assert not caplog.messages
    (folder / "head.safetensors").unlink()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for _ in range(2):
        partial(drafting(again, 5), gated=True, head=True)(ONE, max_new_tokens=3)
    (message,) = [text for text in caplog.messages if "head.safetensors" in text]
    assert message.startswith(f"{folder}/head.safetensors is absent: drafts do not")
    assert not any(isinstance(module, GatedLinear) for module in lm.modules())
    gone = weakref.ref(lm)
    del lm, ours, gated
    gc.collect()
    assert gone() is None
