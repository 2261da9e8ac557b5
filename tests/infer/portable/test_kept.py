"""What one call of custom_generate leaves for the next, and what it does not."""

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from infer.drafters.auto import AutoPolicy
from infer.engine.runner import Runners
from infer.engine.sampling import Sampling
from infer.models.checkpoint import load_adaptive
from infer.ngrams import FILE, NgramTable
from infer.portable.kept import kept_for
from tests.infer.engine.test_families import tiny
from tests.infer.library import PROMPT, drafting, left_padded
from tests.infer.ngram_tables import make_table


def test_a_model_is_freed_with_all_that_was_kept_for_it() -> None:
    """What is kept by model referred to it, so that it would never have been freed."""
    lm = tiny("llama")
    lm.generate = drafting(lm, 5)
    lm.generate(torch.tensor([PROMPT]), max_new_tokens=5)
    gone = weakref.ref(lm)
    del lm
    gc.collect()
    assert gone() is None


def test_what_was_learned_is_kept_until_the_model_moves() -> None:
    lm = tiny("llama")
    ours, prompt = drafting(lm, 5), torch.tensor([PROMPT])

    def policy(batch: int, sampling: Sampling) -> AutoPolicy:
        return kept_for(lm).policy(1, frozenset(), batch=batch, capacity=8, sampling=sampling)

    for _ in range(2):
        ours(prompt, max_new_tokens=5, do_sample=False)
    first = policy(1, Sampling())
    ours(prompt, max_new_tokens=5, do_sample=True, top_k=3, num_return_sequences=2)
    assert policy(1, Sampling()) is first is not policy(2, Sampling(1.0, 3))
    lm.double()
    ours(prompt, max_new_tokens=5, do_sample=False)
    assert policy(1, Sampling()) is not first


def test_a_warmer_text_learns_by_itself() -> None:
    """Each temperature and each top_p cost seconds of measuring. What is learned is kept apart all the same."""
    lm = tiny("llama")
    ours, prompt = drafting(lm, 5), torch.tensor([PROMPT])
    shapes = [(t, p) for p in (1.0, 0.9, 0.5) for t in (0.2, 0.7, 1.3)]
    for temperature, top_p in shapes:
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": top_p}
        ours(prompt, max_new_tokens=3, **sampled)
    kept = kept_for(lm)
    policies = [kept.policy(3, frozenset(), batch=1, capacity=7, sampling=Sampling(t, 0, p)) for t, p in shapes]
    assert len(set(map(id, policies))) == len(shapes)


def test_a_runner_of_fixed_shapes_serves_the_next_call(
    lm: PreTrainedModel, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where its graphs are worth keeping; the library's attention is in use between the calls."""
    made = []

    class Fixed(Runners):
        def __init__(self, lm: PreTrainedModel, *, static: bool | None) -> None:
            super().__init__(lm, static=True)
            made.append(self)

    monkeypatch.setattr("infer.portable.kept.Runners", Fixed)
    other = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    ours, kept = drafting(other, *load_adaptive(model_dir).ids), set[int]()
    for new in (30, 25, 30):
        asked: dict[str, Any] = left_padded([PROMPT, [61, 62]]) | {"max_new_tokens": new, "do_sample": False}
        assert torch.equal(ours(**asked, probes="root"), lm.generate(**asked))
        assert torch.equal(other.generate(**asked), lm.generate(**asked))
        kept.add(id(made[0]._kept))
    assert len(made) == len(kept) == 1


def test_another_librarys_layers_are_put_into_no_graph() -> None:
    """An adapter may be switched off between two calls; a graph would go on with it."""

    class Adapted(torch.nn.Linear):
        pass

    lm = tiny("llama")
    assert kept_for(lm).runners.static is None
    lm.model.layers[0].mlp.up_proj = Adapted(32, 64)
    assert kept_for(lm).runners.static is False


@pytest.mark.parametrize("known", [False, True])
def test_a_model_in_training_that_keeps_no_cache_is_refused(known: bool) -> None:
    """The library drops the cache where gradient checkpointing trains: the tokens were others, or an error of
    PyTorch's came.
    """
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


def test_a_table_that_the_export_had_is_looked_for_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A table of an unknown size was read whatever the model; a moved model read its own again."""
    lm, prompt = tiny("llama"), torch.tensor([PROMPT])
    lm.name_or_path = str(tmp_path)
    texts = set[tuple[int, ...]]()

    def decode(κ: float | None) -> NgramTable | None:
        ours = partial(drafting(lm, 5), ngrams={"table": κ, "text": 1.0, "places": [0.4]})
        texts.add(tuple(ours(prompt, max_new_tokens=5, do_sample=False)[0].tolist()))
        return kept_for(lm).table

    for _ in range(2):
        assert decode(2.0) is None
    lm.double()
    assert decode(2.0) is None and len(caplog.messages) == 1
    assert f"{tmp_path / FILE} is absent" in caplog.text
    lm = tiny("llama")
    assert decode(None) is None and len(caplog.messages) == 1
    lm = tiny("llama")
    lm.name_or_path = str(tmp_path)
    rows = lm.config.vocab_size
    make_table(tmp_path / FILE, [PROMPT, PROMPT], order=3, vocabulary=rows)
    table = decode(0.5)
    lm.double()
    assert table is not None and decode(0.5) is table and len(caplog.messages) == 1 and len(texts) == 1
    lm = tiny("llama")
    lm.name_or_path = str(tmp_path)
    make_table(tmp_path / FILE, [PROMPT], order=3, vocabulary=rows + 1)
    with pytest.raises(ValueError, match=f"must be of at most the model's {rows} ids"):
        decode(0.5)
    with pytest.raises(ValueError, match="ngrams must be numbers table and text"):
        drafting(lm, 5)(prompt, ngrams={"table": 2.0})
