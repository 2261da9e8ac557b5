"""The state of custom_generate between calls: runners, the n-gram table, an adapter."""

import gc
import shutil
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from infer.engine.gate import GatedLinear
from infer.ngrams import FILE, NgramTable
from infer.portable.custom_generate import generate, state_of
from tests.infer.engine.test_families import tiny
from tests.infer.gated import write_adapter
from tests.infer.library import PROMPT, Generate, drafting, left_padded
from tests.infer.ngram_tables import make_table

ONE = torch.tensor([PROMPT])


def test_a_state_lasts_until_the_model_moves_or_is_freed() -> None:
    """The state referred to the model, which was never freed."""
    lm = tiny("llama")
    lm.generate = drafting(lm, 5)
    state = state_of(lm)
    for sample in (False, True, True):
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


def test_fixed_shapes_serve_the_next_call(lm: PreTrainedModel, ours: Generate) -> None:
    """As on a GPU; the library's attention is in use between the calls."""
    state = state_of(lm)
    state.runners.static = True
    try:
        for new in (30, 25, 30):
            args: dict[str, Any] = left_padded([PROMPT, [61, 62]])
            args |= {"max_new_tokens": new, "do_sample": False}
            assert torch.equal(ours(**args, probes="root"), lm.generate(**args))
    finally:
        state.runners.static = None


def test_another_librarys_layers_are_not_in_a_graph() -> None:
    """An adapter may be switched off between two calls; a graph would go on with it."""
    lm = tiny("llama")
    assert state_of(lm).runners.static is None
    foreign = type("Adapted", (torch.nn.Linear,), {"__module__": "other"})
    lm.model.layers[0].mlp.up_proj = foreign(32, 64)
    assert state_of(lm).runners.static is False


def test_a_model_in_training_that_keeps_no_cache_is_refused() -> None:
    """The library drops the cache under gradient checkpointing: tokens differed."""
    lm = tiny("llama")
    ours = drafting(lm, 5)
    ours(ONE, max_new_tokens=5)
    lm.gradient_checkpointing_enable()
    lm.train()
    with pytest.raises(ValueError, match="model must be in evaluation, got training"):
        ours(ONE, max_new_tokens=5)
    lm.eval()
    ours(ONE, max_new_tokens=5)


def test_the_exports_table_is_read_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def from_folder() -> PreTrainedModel:
        lm = tiny("llama")
        lm.name_or_path = str(tmp_path)
        return lm

    def table_of(lm: PreTrainedModel, κ: float | None) -> NgramTable | None:
        weights = {"table": κ, "text": 1.0, "places": [0.4]}
        ours = partial(drafting(lm, 5), ngrams=weights)
        text = ours(ONE, max_new_tokens=5, do_sample=False)
        assert torch.equal(text, lm.generate(ONE, max_new_tokens=5, do_sample=False))
        return state_of(lm).table

    lm = from_folder()
    assert table_of(lm, 2.0) is table_of(lm.double(), 2.0) is None
    assert len(caplog.messages) == 1 and f"{tmp_path / FILE} is absent" in caplog.text
    lm = from_folder()
    rows = lm.config.vocab_size
    make_table(tmp_path / FILE, [PROMPT, PROMPT], order=3, vocabulary=rows)
    table = table_of(lm, 0.5)
    assert table is not None and table_of(lm.double(), 0.5) is table


def test_it_drafts_with_the_adapter_and_writes_the_base_models_text(
    tmp_path: Path,
) -> None:
    """The loaded model stays the base model, and is freed with its state."""
    tiny("llama").save_pretrained(tmp_path / "model")
    adapter = tmp_path / "model" / "adapter"
    write_adapter(tiny("llama"), adapter, r=24, trainable_token_indices=[5])
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ours = partial(drafting(lm, 5), gated=True)
    for args in (left_padded([PROMPT]), left_padded([PROMPT, [61, 62]])):
        args |= {"max_new_tokens": 20, "do_sample": False}
        for probes in ("root", "all", 2, "auto"):
            assert torch.equal(ours(**args, probes=probes), lm.generate(**args))
    gated = state_of(lm, gated=True).lm
    assert any(isinstance(module, GatedLinear) for module in gated.modules())
    assert not any(isinstance(module, GatedLinear) for module in lm.modules())
    gone = weakref.ref(lm)
    del lm, ours, gated
    gc.collect()
    assert gone() is None
    shutil.rmtree(adapter)
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with pytest.raises(
        ValueError, match="come with its gated adapter, got no adapter/"
    ):
        generate(ONE, model=lm, adaptive_ids=[5], L=3, gated=True)
