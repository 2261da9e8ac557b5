"""What a call of custom_generate leaves for the next: policies, runners, the n-gram table, an adapter."""

import gc
import shutil
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from infer.drafters.adaptive import Policy
from infer.engine.gate import GatedLinear
from infer.engine.sampling import Sampling
from infer.models.checkpoint import ModelDirectory
from infer.ngrams import FILE, NgramTable
from infer.portable.custom_generate import drafting_of, generate, state_of
from tests.infer.engine.test_families import tiny
from tests.infer.gated import write_adapter
from tests.infer.library import PROMPT, drafting, left_padded
from tests.infer.ngram_tables import make_table


def policy_of(lm: PreTrainedModel, *, batch: int = 1, sampling: Sampling) -> Policy:
    """Return the policy of the next call with these."""
    own = drafting_of([5], 3, None, None, None, None, None)
    return own.policy(state_of(lm), batch=batch, capacity=9, sampling=sampling)


def test_what_was_learned_lasts_until_the_model_moves_or_is_freed() -> None:
    """The state referred to the model, which was never freed."""
    lm, prompt = tiny("llama"), torch.tensor([PROMPT])
    lm.generate = drafting(lm, 5)
    for _ in range(2):
        lm.generate(prompt, max_new_tokens=5, do_sample=False)
    first = policy_of(lm, sampling=Sampling())
    lm.generate(
        prompt, max_new_tokens=5, do_sample=True, top_k=3, num_return_sequences=2
    )
    assert policy_of(lm, sampling=Sampling()) is first
    assert policy_of(lm, batch=2, sampling=Sampling(1.0, 3)) is not first
    lm.double()
    lm.generate(prompt, max_new_tokens=5, do_sample=False)
    assert policy_of(lm, sampling=Sampling()) is not first
    gone = weakref.ref(lm)
    del lm
    gc.collect()
    assert gone() is None


def test_a_runner_of_fixed_shapes_serves_the_next_call(
    lm: PreTrainedModel, model_dir: Path
) -> None:
    """As on a GPU, where it keeps its graphs; the library's attention is in use between the calls."""
    other = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    ours, state, runners = (
        drafting(other, *ModelDirectory(model_dir).need_adaptive().ids),
        state_of(other),
        set[int](),
    )
    state.runners.static = True
    for new in (30, 25, 30):
        args: dict[str, Any] = left_padded([PROMPT, [61, 62]]) | {
            "max_new_tokens": new,
            "do_sample": False,
        }
        assert torch.equal(ours(**args, probes="root"), lm.generate(**args))
        assert torch.equal(other.generate(**args), lm.generate(**args))
        runners.add(id(state.runners._idle))
    assert state_of(other) is state and len(runners) == 1


def test_another_librarys_layers_are_not_in_a_graph() -> None:
    """An adapter may be switched off between two calls; a graph would go on with it."""
    lm = tiny("llama")
    assert state_of(lm).runners.static is None
    lm.model.layers[0].mlp.up_proj = type(
        "Adapted", (torch.nn.Linear,), {"__module__": "other"}
    )(32, 64)
    assert state_of(lm).runners.static is False


@pytest.mark.parametrize("known", [False, True])
def test_a_model_in_training_that_keeps_no_cache_is_refused(known: bool) -> None:
    """The library drops the cache when gradient checkpointing trains: tokens differed, or PyTorch failed."""
    lm, prompt = tiny("llama"), torch.tensor([PROMPT])
    ours = drafting(lm, 5)
    if known:
        ours(prompt, max_new_tokens=5)
    lm.gradient_checkpointing_enable()
    lm.train()
    with pytest.raises(ValueError, match="model must be in evaluation, got training"):
        ours(prompt, max_new_tokens=5)
    lm.eval()
    ours(prompt, max_new_tokens=5)


def test_the_exports_table_is_read_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A table of another vocabulary was read; a moved model read its own again."""
    prompt, texts = torch.tensor([PROMPT]), set[tuple[int, ...]]()

    def from_folder() -> PreTrainedModel:
        lm = tiny("llama")
        lm.name_or_path = str(tmp_path)
        return lm

    def decode(lm: PreTrainedModel, κ: float | None) -> NgramTable | None:
        ours = partial(
            drafting(lm, 5), ngrams={"table": κ, "text": 1.0, "places": [0.4]}
        )
        texts.add(tuple(ours(prompt, max_new_tokens=5, do_sample=False)[0].tolist()))
        return state_of(lm).table

    lm = from_folder()
    assert [
        decode(lm, 2.0),
        decode(lm, 2.0),
        decode(lm.double(), 2.0),
        decode(tiny("llama"), None),
    ] == [None] * 4
    assert len(caplog.messages) == 1 and f"{tmp_path / FILE} is absent" in caplog.text
    lm, rows = from_folder(), lm.config.vocab_size
    make_table(tmp_path / FILE, [PROMPT, PROMPT], order=3, vocabulary=rows)
    table = decode(lm, 0.5)
    assert table is not None and decode(lm.double(), 0.5) is table
    assert len(caplog.messages) == 1 and len(texts) == 1
    make_table(tmp_path / FILE, [PROMPT], order=3, vocabulary=rows + 1)
    with pytest.raises(ValueError, match=f"must be of at most the model's {rows} ids"):
        decode(from_folder(), 0.5)
    with pytest.raises(ValueError, match="ngrams must be numbers table and text"):
        drafting(lm, 5)(prompt, ngrams={"table": 2.0})


@pytest.fixture
def gated(tmp_path: Path) -> Path:
    tiny("llama").save_pretrained(tmp_path / "model")
    write_adapter(
        tiny("llama"), tmp_path / "model" / "adapter", r=24, trainable_token_indices=[5]
    )
    return tmp_path / "model"


def test_it_drafts_with_the_adapter_and_writes_the_base_models_text(
    gated: Path,
) -> None:
    """Alone and in a batch. The loaded model stays the base model, and is freed with its state."""
    lm = AutoModelForCausalLM.from_pretrained(gated, dtype=torch.float32).eval()
    for args in (left_padded([PROMPT]), left_padded([PROMPT, [61, 62]])):
        args |= {"max_new_tokens": 20, "do_sample": False}
        plain = lm.generate(**args)
        for probes in ("root", "all", 2, "auto"):
            result = generate(
                model=lm, adaptive_ids=[5], L=3, gated=True, probes=probes, **args
            )
            assert torch.equal(result, plain)
    assert any(
        isinstance(module, GatedLinear)
        for module in state_of(lm, gated=True).lm.modules()
    )
    assert not any(isinstance(module, GatedLinear) for module in lm.modules())
    gone = weakref.ref(lm)
    del lm
    gc.collect()
    assert gone() is None


def test_a_model_without_its_adapter_is_refused(gated: Path) -> None:
    shutil.rmtree(gated / "adapter")
    lm = AutoModelForCausalLM.from_pretrained(gated, dtype=torch.float32).eval()
    with pytest.raises(
        ValueError,
        match="model must have come with its gated adapter, got .* no adapter/",
    ):
        generate(
            torch.tensor([PROMPT]),
            model=lm,
            adaptive_ids=[5],
            L=3,
            gated=True,
            max_new_tokens=5,
        )
