"""custom_generate with a gated adapter, which is read from beside the weights."""

import gc
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from infer.engine.gate import GatedLinear
from infer.portable.custom_generate import generate
from infer.portable.kept import kept_for
from tests.infer.engine.test_families import tiny
from tests.infer.gated import write_adapter
from tests.infer.library import PROMPT, left_padded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("llama").save_pretrained(tmp_path / "model")
    write_adapter(tiny("llama"), tmp_path / "model" / "adapter", r=24, trainable_token_indices=[5])
    return tmp_path / "model"


def test_it_drafts_with_the_adapter_and_writes_the_base_models_text(folder: Path) -> None:
    """Alone and in a batch. The loaded model stays the base model, and is freed with what was kept for it."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for asked in (left_padded([PROMPT]), left_padded([PROMPT, [61, 62]])):
        asked |= {"max_new_tokens": 20, "do_sample": False}
        plain = lm.generate(**asked)
        for probes in ("root", "all", 2, "auto"):
            assert torch.equal(
                generate(model=lm, adaptive_ids=[5], L=3, gated=True, probes=probes, **asked), plain
            )
    assert any(isinstance(module, GatedLinear) for module in kept_for(lm, gated=True).lm.modules())
    assert not any(isinstance(module, GatedLinear) for module in lm.modules())
    gone = weakref.ref(lm)
    del lm
    gc.collect()
    assert gone() is None


def test_a_model_without_its_adapter_is_refused(folder: Path) -> None:
    shutil.rmtree(folder / "adapter")
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with pytest.raises(ValueError, match="model must have come with its gated adapter, got .* no adapter/"):
        generate(torch.tensor([PROMPT]), model=lm, adaptive_ids=[5], L=3, gated=True, max_new_tokens=5)
