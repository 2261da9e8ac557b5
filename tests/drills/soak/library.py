"""A case by `model.generate`: the library's own decoding, and custom_generate's."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList

from infer import Model
from tests.drills.soak.callers import Enough, FailingCriterion, Listener, Stopped, Told
from tests.drills.soak.cases import Case, Way, ids_of

PAD = 2


def _asked(case: Case, model: Model, ids: list[list[int]]) -> dict[str, Any]:
    """The library's arguments, for prompts filled up on the left."""
    plain, longest = case.plain, max(map(len, ids))
    before = [longest - len(one) for one in ids]
    sampled = {"temperature": plain.temperature, "top_k": plain.top_k, "top_p": plain.top_p}
    return {
        "input_ids": torch.tensor([[PAD] * n + one for n, one in zip(before, ids)]),
        "attention_mask": torch.tensor([[0] * n + [1] * len(one) for n, one in zip(before, ids)]),
        "max_new_tokens": plain.max_new_tokens,
        "min_new_tokens": plain.min_new_tokens,
        "repetition_penalty": plain.repetition_penalty,
        "no_repeat_ngram_size": plain.no_repeat_ngram_size,
        "eos_token_id": sorted(model.eos),
        "pad_token_id": PAD,
        "do_sample": plain.temperature > 0,
        **(sampled if plain.temperature else {}),
    }


def by_itself(lm: PreTrainedModel, case: Case, model: Model, ids: list[int]) -> list[int]:
    """The library's own greedy decoding of a prompt alone."""
    return GenerationMixin.generate(lm, **_asked(case, model, [ids]))[0, len(ids) :].tolist()  # type: ignore[arg-type]


def by_custom_generate(
    lm: PreTrainedModel, case: Case, way: Way, model: Model, plain: list[Told], folder: str
) -> Iterator[list[Told]]:
    """By `model.generate`, whose text is ids alone."""
    ids, attention = [ids_of(prompt, model.text) for prompt in case.prompts], lm.config._attn_implementation
    asked, listener = _asked(case, model, ids), None
    longest = asked["input_ids"].shape[1]
    if way.ending == "stopped":
        asked["stopping_criteria"] = StoppingCriteriaList([Enough(longest + way.after)])
    if way.ending == "criterion raises":
        asked["stopping_criteria"] = StoppingCriteriaList([FailingCriterion(way.after)])
    if way.ending in ("streamed", "streamer raises"):
        asked["streamer"] = listener = Listener(way.after if way.ending == "streamer raises" else None)
    try:
        rows = lm.generate(
            **asked, **way.settings, seed=case.seeds[0], custom_generate=folder, trust_remote_code=True
        )[:, longest:].tolist()
    except Stopped:
        assert way.ending.endswith("raises")
        rows = None
    assert lm.config._attn_implementation == attention
    if listener:
        heard = [id for ids in listener.heard[1:] for id in ids]  # the prompt comes first
        yield [Told(heard, plain[0].text if rows else "", whole=rows is not None)]
    if rows is not None:
        cut = way.after if way.ending == "stopped" else None
        yield [_told(row, one, cut) for row, one in zip(rows, plain)]


def _told(row: list[int], wanted: Told, cut: int | None) -> Told:
    """A row without what fills it up."""
    length = len(wanted.tokens[:cut])
    tokens = row[:length] if set(row[length:]) <= {PAD} else row
    whole = length == len(wanted.tokens)
    return Told(tokens, wanted.text if whole else "", whole=whole)
