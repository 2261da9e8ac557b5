"""Test custom_generate against the library's greedy tokens and `infer.generate`'s samples."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)

from infer import DecodeConfig, Model
from infer.engine.pick import Logits, probabilities
from infer.portable.generate_args import sampling_of
from tests.infer.library import (
    PROMPT,
    Ends,
    Generate,
    Listener,
    left_padded,
    tokens_of,
)

IDS = st.lists(st.integers(13, 399), min_size=1, max_size=12)
DRAFTING: list[dict[str, Any]] = [
    {"probes": "root"},
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
    """Sequence b has the seed `seed + b`, whatever the batch and the drafts are."""
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
    plain = DecodeConfig("plain", **shape)
    expected = tokens_of(model, prompts, plain, seeds=seeds)
    args = left_padded(prompts) | {"do_sample": True, "seed": seed, "pad_token_id": 2}
    for drafting in DRAFTING:
        result = ours(**args, **shape, **drafting)[:, args["input_ids"].shape[1] :]
        for text, own in zip(result.tolist(), expected, strict=True):
            assert text[: len(own)] == own, drafting
            assert set(text[len(own) :]) <= {2}


WARPERS = {
    "temperature": st.sampled_from([0.3, 1.0, 2.5]),
    "top_k": st.sampled_from([0, 1, 20]),
    "top_p": st.sampled_from([0.5, 0.9, 1.0]),
    "min_p": st.sampled_from([0.02, 0.3]),
    "top_h": st.sampled_from([0.2, 0.7]),
    "typical_p": st.sampled_from([0.4, 0.95]),
    "epsilon_cutoff": st.sampled_from([3e-3, 0.05]),
    "eta_cutoff": st.sampled_from([3e-3, 0.05]),
}


@settings(max_examples=60)
@given(st.fixed_dictionaries({}, optional=WARPERS), st.integers(0, 2**31))
def test_the_distribution_is_that_of_the_librarys_warpers(
    lm: PreTrainedModel, fields: dict[str, Any], seed: int
) -> None:
    """Every field of sampling: the tokens that are kept, and their probabilities."""
    config = GenerationConfig(do_sample=True, **fields)
    warpers = lm._get_logits_processor(config, input_ids_seq_length=4, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(1, 400, generator=generator)
    expected = warpers(ONE, scores.clone()).softmax(-1)
    sampling, rest = sampling_of(warpers, sample=True)
    own = probabilities(Logits(nn.Identity(), scores, rest(ONE, scores)), sampling)
    assert torch.equal(own > 0, expected > 0)
    torch.testing.assert_close(own.float(), expected)


def test_without_a_seed_pytorchs_generator_decides(ours: Generate) -> None:
    """set_seed repeats a call, and greedy decoding draws no random numbers."""
    args = {"max_new_tokens": 20, "num_return_sequences": 3, "do_sample": True}
    texts = []
    for _ in range(2):
        set_seed(7)
        texts.append(ours(ONE, **args).tolist())
    assert texts[0] == texts[1] != ours(ONE, **args).tolist()
    before = torch.get_rng_state()
    ours(ONE, max_new_tokens=3, do_sample=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_stop_strings_end_the_text(
    lm: PreTrainedModel, ours: Generate, model_dir: Path
) -> None:
    """The library does not pass the tokenizer to a callable."""
    file = str(model_dir / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file)
    args = {"max_new_tokens": 30, "do_sample": False}
    text = tokenizer.decode(lm.generate(ONE, **args)[0, len(PROMPT) :])
    stops = args | {"stop_strings": [text[9:12]]}
    expected = lm.generate(ONE, **stops, tokenizer=tokenizer)
    assert expected.shape[1] < len(PROMPT) + 30
    for config in (None, GenerationConfig(**stops)):
        given = {} if config else stops
        assert torch.equal(ours(ONE, config, **given, tokenizer=tokenizer), expected)


def test_it_takes_what_generate_takes(lm: PreTrainedModel, ours: Generate) -> None:
    """A prompt by position, by name, or no prompt; a dict, a streamer, a constraint."""
    theirs = Listener()
    mine = Listener()
    expected = lm.generate(ONE, streamer=theirs)
    assert torch.equal(ours(input_ids=ONE, streamer=mine), expected)
    assert mine.heard == theirs.heard and mine.heard[-1] == "end"
    output = ours(inputs=ONE, return_dict_in_generate=True)
    assert type(output) is type(lm.generate(ONE, return_dict_in_generate=True))
    assert torch.equal(output.sequences, expected)
    assert output.past_key_values is None  # docs/export.md says so
    assert torch.equal(ours(max_new_tokens=5), lm.generate(max_new_tokens=5))
    args = {"prefix_allowed_tokens_fn": lambda b, ids: [20 + len(ids), 30]}
    assert torch.equal(ours(ONE, **args), lm.generate(ONE, **args))


def test_a_length_beyond_the_context_is_cut(
    lm: PreTrainedModel, ours: Generate, caplog: pytest.LogCaptureFixture
) -> None:
    """`transformers serve` asks for 1,024 new tokens by default."""
    config = GenerationConfig(max_new_tokens=1024, do_sample=False)
    near = torch.tensor([[13 + id % 300 for id in range(510)]])
    expected = lm.generate(near, max_new_tokens=2, do_sample=False)
    for drafting in DRAFTING:
        assert torch.equal(ours(near, config, **drafting), expected)
    assert "max_new_tokens=1024 exceeds the model's context: cut to 2" in caplog.text


def test_a_requests_temperature_samples(ours: Generate, lm: PreTrainedModel) -> None:
    """`transformers serve` puts temperature into a config without do_sample.

    Bug: a temperature of 0 in such a config was an error instead of greedy decoding.
    """
    args = {"max_new_tokens": 20, "top_k": 0}
    expected = ours(ONE, **args, do_sample=True, temperature=1.4, seed=5)
    request = GenerationConfig(temperature=1.4, **args)
    assert torch.equal(ours(ONE, request, seed=5), expected)
    greedy = ours(ONE, max_new_tokens=20, do_sample=False)
    for config in (
        GenerationConfig(temperature=1.4, do_sample=False, **args),
        GenerationConfig(temperature=0.0, **args),
        lm.generation_config,
    ):
        assert torch.equal(ours(ONE, config, max_new_tokens=20, seed=5), greedy)


def test_a_streamer_of_several_sequences_is_refused(ours: Generate) -> None:
    """Bug: a streamer got the tokens of all sequences one by one, without their sequence."""
    batch = left_padded([[20, 30, 40], [51]])
    for args in ({**batch}, {"input_ids": ONE, "num_return_sequences": 2}):
        with pytest.raises(ValueError, match="without streamer for several sequences"):
            ours(**args, max_new_tokens=4, do_sample=True, streamer=Listener())


def test_a_model_without_the_adaptive_tokens_is_refused(ours: Generate) -> None:
    """Bug: the base model with its export's custom_generate ended in an IndexError."""
    with pytest.raises(ValueError, match="adaptive token 401, got a model of 400 ids"):
        ours(ONE, adaptive_ids=[7, 401])


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ({"assistant_model": "another model"}, "assistant_model"),
        ({"cache_implementation": "paged"}, "cache_implementation='paged'"),
        ({"token_healing": True, "tokenizer": "a tokenizer"}, "token_healing"),
        ({"generation_config": GenerationConfig(token_healing=True)}, "token_healing"),
    ],
)
def test_arguments_that_the_library_does_not_pass_on_are_refused(
    ours: Generate, args: dict[str, Any], name: str
) -> None:
    """Bug: the library dropped the assistant model, and decoded by itself with a paged cache.

    Token healing asked for the tokenizer that the caller had given.
    """
    with pytest.raises(ValueError, match=f"called without {name}. Use"):
        ours(ONE, **args)


def test_a_source_may_be_a_string(ours: Generate) -> None:
    """Bug: its letters were taken as sources."""
    texts = [ours(ONE, max_new_tokens=6, sources=s) for s in ("text", ["text"])]
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "at least one token"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "padding_side='left'"),
        ({"attention_mask": torch.tensor([[0, 1]])}, r"\(1, 4\), got \(1, 2\)"),
        (
            {"input_ids": torch.full((1, 512), 7), "max_new_tokens": 5},
            "context of 512 tokens, got 512",
        ),
        ({"num_beams": 2}, "without decoding by beam_search"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"position_ids": torch.tensor([[4, 5, 6, 7]])}, "without position_ids"),
        (
            {"num_return_sequences": 2, "prefix_allowed_tokens_fn": lambda b, ids: [3]},
            "prefix_allowed_tokens_fn for several",
        ),
        ({"k": 2.5}, "k must be a whole number, got 2.5"),
        ({"seed": -1}, "^seed must be"),
    ],
)
def test_what_it_does_not_support(
    ours: Generate, args: dict[str, Any], message: str
) -> None:
    """Bug: with a mask of another length, the wrong part of a prompt was taken as padding."""
    with pytest.raises(ValueError, match=message):
        ours(**{"input_ids": ONE, "do_sample": "num_return_sequences" in args} | args)
