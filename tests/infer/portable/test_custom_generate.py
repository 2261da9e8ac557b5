"""`model.generate` by this decoder: the library's greedy tokens, `infer.generate`'s draws."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)

from infer import DecodeConfig, Model
from infer import generate as by_infer
from infer.engine.sampling import Sampling
from infer.portable.generate_args import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    prompts_of,
    sampling_of,
)
from tests.infer.library import PROMPT, Ends, Generate, Listener, left_padded

IDS = st.lists(st.integers(13, 399), min_size=1, max_size=12)
DRAFTING: list[dict[str, Any]] = [
    {"probes": "root"},
    {"probes": "root", "k": 1},
    {"probes": "all", "k": 2},
    {"probes": 2, "k": 4},
    {},
]
ONE = torch.tensor([PROMPT])


@settings(max_examples=25)
@given(st.data())
def test_greedy_is_the_librarys_greedy(
    lm: PreTrainedModel, ours: Generate, data: st.DataObject
) -> None:
    """Left-padded batches, lengths, ends, and processors that use rows and columns."""
    args = left_padded(data.draw(st.lists(IDS, min_size=1, max_size=3)))
    new = data.draw(st.integers(1, 24))
    args |= {"max_new_tokens": new, "do_sample": False, "pad_token_id": 2}
    ends = data.draw(st.lists(st.integers(13, 399), min_size=1, max_size=90))
    further = {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": max(1, new // 2),
        "min_length": args["input_ids"].shape[1] + new // 2,
        "eos_token_id": ends,
        "bad_words_ids": [[20], [30, 41]],
        "suppress_tokens": list(range(100, 120)),
        "forced_eos_token_id": 1,
        "encoder_repetition_penalty": 1.5,
        "exponential_decay_length_penalty": (2, 1.2),
        "begin_suppress_tokens": list(range(50)),
        "stopping_criteria": [Ends(5)],
    }
    names = st.lists(st.sampled_from(sorted(further)), max_size=3, unique=True)
    chosen = data.draw(names)
    args |= {name: further[name] for name in chosen}
    expected = lm.generate(**args)
    for drafting in DRAFTING:
        assert torch.equal(ours(**args, **drafting), expected), (drafting, chosen)


@settings(max_examples=15)
@given(st.data())
def test_draws_are_those_of_infer(
    ours: Generate, model: Model, data: st.DataObject
) -> None:
    """Sequence b has the seed `seed + b`, whatever is beside it and is drafted."""
    prompts = data.draw(st.lists(IDS, min_size=1, max_size=3))
    seed = data.draw(st.integers(0, 2**63 - 1))
    shape = {
        "max_new_tokens": data.draw(st.integers(1, 24)),
        "temperature": data.draw(st.sampled_from([0.5, 1.0, 1.7])),
        "top_k": data.draw(st.sampled_from([0, 5])),
        "top_p": data.draw(st.sampled_from([0.7, 1.0])),
        "repetition_penalty": data.draw(st.sampled_from([1.0, 1.2])),
    }
    seeds = [(seed + b) % 2**63 for b in range(len(prompts))]
    expected: list[list[int]] = [[] for _ in prompts]
    for step in by_infer(model, prompts, DecodeConfig("plain", **shape), seeds=seeds):
        expected[step.sequence] += step.tokens
    args = left_padded(prompts) | {"do_sample": True, "seed": seed, "pad_token_id": 2}
    for drafting in DRAFTING:
        result = ours(**args, **shape, **drafting)[:, args["input_ids"].shape[1] :]
        for text, own in zip(result.tolist(), expected, strict=True):
            assert text[: len(own)] == own, drafting
            assert set(text[len(own) :]) <= {2}


def test_warpers_in_another_order_stay_processors() -> None:
    p = TopPLogitsWarper(0.5)
    k = TopKLogitsWarper(4)
    t = TemperatureLogitsWarper(0.6)
    wide = TopPLogitsWarper(0.5, min_tokens_to_keep=2)
    assert sampling_of([t, k, p], sample=True) == (Sampling(0.6, 4, 0.5), [])
    assert sampling_of([p, k, t], sample=True) == (Sampling(0.6), [p, k])
    assert sampling_of([t, p, k], sample=True) == (Sampling(1.0, 4), [t, p])
    assert sampling_of([t, wide], sample=True) == (Sampling(1.0), [t, wide])
    assert sampling_of([t, p], sample=False) == (Sampling(), [t, p])


def test_without_a_seed_pytorchs_generator_decides(ours: Generate) -> None:
    """Two calls differ and set_seed repeats them. Greedy decoding draws nothing."""
    args = {"max_new_tokens": 20, "num_return_sequences": 3, "probes": "root"}
    texts = []
    for _ in range(2):
        set_seed(7)
        texts.append([ours(ONE, **args, do_sample=True).tolist() for _ in range(2)])
    assert texts[0] == texts[1]
    assert len({tuple(row) for batch in texts[0] for row in batch}) == 6
    before = torch.get_rng_state()
    ours(ONE, max_new_tokens=3, do_sample=False, probes="root")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_streamer_gets_what_the_library_gives(
    lm: PreTrainedModel, ours: Generate
) -> None:
    theirs = Listener()
    mine = Listener()
    lm.generate(ONE, max_new_tokens=9, do_sample=False, streamer=theirs)
    ours(ONE, max_new_tokens=9, do_sample=False, streamer=mine)
    assert mine.heard == theirs.heard and mine.heard[-1] == "end"


def test_stop_strings_end_the_text(
    lm: PreTrainedModel, ours: Generate, model_dir: Path
) -> None:
    """The library loses the tokenizer on the way to a callable."""
    file = str(model_dir / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file)
    args = {"max_new_tokens": 30, "do_sample": False}
    text = tokenizer.decode(lm.generate(ONE, **args)[0, len(PROMPT) :])
    stops = args | {"stop_strings": [text[9:12]]}
    expected = lm.generate(ONE, **stops, tokenizer=tokenizer)
    assert expected.shape[1] < len(PROMPT) + 30
    assert torch.equal(ours(ONE, **stops, tokenizer=tokenizer), expected)
    config = GenerationConfig(**stops)
    assert torch.equal(ours(ONE, config, tokenizer=tokenizer), expected)


def test_it_takes_what_generate_takes(lm: PreTrainedModel, ours: Generate) -> None:
    """A prompt by position, by name, or none; a dict; many rows; a prefix constraint."""
    expected = lm.generate(ONE)
    assert torch.equal(ours(ONE), expected)
    assert torch.equal(ours(input_ids=ONE), expected)
    output = ours(inputs=ONE, return_dict_in_generate=True)
    assert type(output) is type(lm.generate(ONE, return_dict_in_generate=True))
    assert torch.equal(output.sequences, expected)
    assert torch.equal(ours(max_new_tokens=5), lm.generate(max_new_tokens=5))
    many = torch.tensor([[token, token + 1] for token in range(20, 32)])
    assert torch.equal(ours(many, max_length=9), lm.generate(many, max_length=9))
    args = {"prefix_allowed_tokens_fn": lambda b, ids: [20 + len(ids), 30]}
    assert torch.equal(ours(ONE, **args), lm.generate(ONE, **args))
    sampled = {"max_new_tokens": 9, "do_sample": True}
    result = ours(ONE, **sampled, k=np.int64(2), probes=np.int64(1), seed=np.uint8(5))
    assert torch.equal(result, ours(ONE, **sampled, k=2, probes=1, seed=5))


def test_a_given_custom_generate_goes_first(
    lm: PreTrainedModel, ours: Generate
) -> None:
    """`model.generate` is this function in a model loaded with trust_remote_code."""
    seen = {}

    def other(
        model: PreTrainedModel, input_ids: Tensor, k: int = 0, **args: Any
    ) -> Tensor:
        seen.update(model=model, k=k)
        return input_ids

    assert torch.equal(ours(ONE, custom_generate=other, k=4), ONE)
    assert seen == {"model": lm, "k": 4}


@given(st.lists(IDS, min_size=1, max_size=4), st.data())
def test_prompts_are_rows_without_padding(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    batch = left_padded(prompts)
    ids = batch["input_ids"]
    assert prompts_of(ids, batch["attention_mask"]) == prompts
    bits = st.lists(st.sampled_from([0, 1]), min_size=ids.numel(), max_size=ids.numel())
    mask = torch.tensor(data.draw(bits)).view_as(ids)
    if all(sorted(row) == row and row[-1] for row in mask.tolist()):
        assert all(prompts_of(ids, mask))
    else:
        with pytest.raises(ValueError, match="attention_mask"):
            prompts_of(ids, mask)


def test_near_the_end_of_the_context(
    lm: PreTrainedModel, ours: Generate, caplog: pytest.LogCaptureFixture
) -> None:
    """k of training fits what is left; a length beyond the context is cut.

    `transformers serve` asks for 1,024 new tokens by default.
    """
    context = lm.config.max_position_embeddings
    near = torch.tensor([[13 + id % 300 for id in range(context - 2)]])
    expected = lm.generate(near, max_new_tokens=2, do_sample=False)
    for drafting in DRAFTING:
        result = ours(near, max_new_tokens=2, do_sample=False, **drafting)
        assert torch.equal(result, expected)
    config = GenerationConfig(max_new_tokens=1024, do_sample=False)
    args: dict[str, Any] = left_padded([PROMPT, [7]])
    expected = lm.generate(**args, max_new_tokens=508, do_sample=False)
    assert torch.equal(ours(**args, generation_config=config), expected)
    assert "max_new_tokens=1024 exceeds the model's context: cut to 508" in caplog.text


def test_a_requests_temperature_samples(ours: Generate, lm: PreTrainedModel) -> None:
    """`transformers serve` puts temperature into a config without do_sample."""
    args = {"max_new_tokens": 20, "top_k": 0}
    greedy = ours(ONE, max_new_tokens=20, do_sample=False)
    expected = ours(ONE, **args, do_sample=True, temperature=1.4, seed=5)
    assert not torch.equal(expected, greedy)
    request = GenerationConfig(temperature=1.4, **args)
    assert torch.equal(ours(ONE, request, seed=5), expected)
    for config in (
        GenerationConfig(temperature=1.4, do_sample=False, **args),
        GenerationConfig(**args),
        lm.generation_config,
    ):
        assert torch.equal(ours(ONE, config, max_new_tokens=20, seed=5), greedy)


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "at least one token"),
    ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "padding_side='left'"),
    (
        {"input_ids": torch.full((1, 512), 7), "max_new_tokens": 5},
        "context of 512 tokens, got 512",
    ),
    ({"num_beams": 2}, "without decoding by beam_search"),
    ({"prompt_lookup_num_tokens": 3}, "without decoding by assisted_generation"),
    ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    ({"guidance_scale": 2.0}, "without UnbatchedClassifierFree"),
    ({"inputs_embeds": torch.zeros(1, 4, 32)}, "without inputs_embeds"),
    ({"position_ids": torch.tensor([[4, 5, 6, 7]])}, "without position_ids"),
    (
        {
            "input_ids": torch.tensor([PROMPT, PROMPT]),
            "prefix_allowed_tokens_fn": lambda b, ids: [3],
        },
        "prefix_allowed_tokens_fn for several",
    ),
    ({"k": 0}, "k must be at least 1, got 0"),
    ({"k": 2.5}, "k must be a whole number, got 2.5"),
    ({"probes": "some"}, "probes must be auto, root, all or a number"),
    ({"sources": ["web"]}, "sources must be"),
    ({"seed": -1}, "seed must be"),
    ({"max_new_token": 5}, "max_new_token"),
]


@pytest.mark.parametrize(("args", "message"), UNSUPPORTED)
def test_what_it_does_not_support(
    ours: Generate, lm: PreTrainedModel, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ours(**{"input_ids": ONE} | args)
    assert lm.config._attn_implementation == "sdpa"
