"""`model.generate` by this decoder: the library's greedy tokens and `infer.generate`'s draws."""

from pathlib import Path
from typing import Any

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
from infer.portable.generate_args import WARPERS, prompts_of, sampling_of
from tests.infer.library import PROMPT, Ends, Generate, Listener, left_padded

IDS = st.lists(st.integers(13, 399), min_size=1, max_size=12)
WAYS: list[dict[str, Any]] = [
    {"probes": "root"},
    {"probes": "root", "k": 1},
    {"probes": "all", "k": 2},
]
WAYS += [{"probes": 2, "k": 4}, {}]


@settings(max_examples=25)
@given(st.data())
def test_greedy_is_the_librarys_greedy(
    lm: PreTrainedModel, ours: Generate, data: st.DataObject
) -> None:
    """Batches padded on the left, lengths, ends, and processors that use rows and columns."""
    args = left_padded(data.draw(st.lists(IDS, min_size=1, max_size=3)))
    new = data.draw(st.integers(1, 24))
    args |= {"max_new_tokens": new, "do_sample": False, "pad_token_id": 2}
    further = {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": max(1, new // 2),
        "min_length": args["input_ids"].shape[1] + new // 2,
        "eos_token_id": data.draw(
            st.lists(st.integers(13, 399), min_size=1, max_size=90)
        ),
        "bad_words_ids": [[20], [30, 41]],
        "suppress_tokens": list(range(100, 120)),
        "forced_eos_token_id": 1,
        "encoder_repetition_penalty": 1.5,
        "exponential_decay_length_penalty": (2, 1.2),
        "begin_suppress_tokens": list(range(50)),
    }
    chosen = data.draw(
        st.lists(st.sampled_from(sorted(further)), max_size=3, unique=True)
    )
    args |= {name: further[name] for name in chosen}
    expected = lm.generate(**args)
    for way in WAYS:
        assert torch.equal(ours(**args, **way), expected), (way, chosen)


@settings(max_examples=15)
@given(st.data())
def test_draws_are_those_of_infer(
    ours: Generate, model: Model, data: st.DataObject
) -> None:
    """Sequence b has the seed `seed + b`, whatever is beside it and is drafted."""
    prompts = data.draw(st.lists(IDS, min_size=1, max_size=3))
    seed, new = data.draw(st.integers(0, 2**63 - 1)), data.draw(st.integers(1, 24))
    shape = {
        "temperature": data.draw(st.sampled_from([0.5, 1.0, 1.7])),
        "top_k": data.draw(st.sampled_from([0, 5])),
        "top_p": data.draw(st.sampled_from([0.7, 1.0])),
        "repetition_penalty": data.draw(st.sampled_from([1.0, 1.2])),
    }
    seeds = [(seed + b) % 2**63 for b in range(len(prompts))]
    plain = DecodeConfig("plain", max_new_tokens=new, **shape)
    expected = [list[int]() for _ in prompts]
    for step in by_infer(model, prompts, plain, seeds=seeds):
        expected[step.sequence] += step.tokens
    args = left_padded(prompts)
    for way in WAYS:
        result = ours(
            **args,
            do_sample=True,
            max_new_tokens=new,
            seed=seed,
            pad_token_id=2,
            **shape,
            **way,
        )
        texts = result[:, args["input_ids"].shape[1] :].tolist()
        assert [text[: len(own)] for text, own in zip(texts, expected)] == expected, way
        assert all(set(text[len(own) :]) <= {2} for text, own in zip(texts, expected))


def test_warpers_in_another_order_stay_processors() -> None:
    p, k, t = (kind(value) for (kind, _), value in zip(WARPERS, (0.5, 4, 0.6)))
    assert sampling_of([t, k, p], sample=True) == (Sampling(0.6, 4, 0.5), [])
    assert sampling_of([p, k, t], sample=True) == (Sampling(0.6, 0, 1.0), [p, k])
    assert sampling_of([t, p, k], sample=True) == (Sampling(1.0, 4, 1.0), [t, p])
    wide = WARPERS[0][0](0.5, min_tokens_to_keep=2)
    assert sampling_of([t, wide], sample=True) == (Sampling(1.0), [t, wide])
    assert sampling_of([t, p], sample=False) == (Sampling(), [t, p])


def test_without_a_seed_pytorchs_generator_decides(ours: Generate) -> None:
    """Two calls differ, as the library's do, and set_seed repeats them. Greedy decoding draws nothing."""
    args = {
        "max_new_tokens": 20,
        "do_sample": True,
        "num_return_sequences": 3,
        "probes": "root",
    }
    texts = []
    for _ in range(2):
        set_seed(7)
        texts.append([ours(torch.tensor([PROMPT]), **args).tolist() for _ in range(2)])
    assert texts[0] == texts[1]
    rows = [tuple(row) for batch in texts[0] for row in batch]
    assert len(set(rows)) == len(rows) == 6
    before = torch.get_rng_state()
    ours(torch.tensor([PROMPT]), max_new_tokens=3, do_sample=False, probes="root")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("way", WAYS)
def test_a_streamer_gets_what_the_library_gives(
    lm: PreTrainedModel, ours: Generate, way: dict[str, Any]
) -> None:
    """The library passes no streamer to a callable: it got the prompt, and never the end."""
    theirs, mine = Listener(), Listener()
    lm.generate(
        torch.tensor([PROMPT]), max_new_tokens=9, do_sample=False, streamer=theirs
    )
    ours(
        torch.tensor([PROMPT]), max_new_tokens=9, do_sample=False, streamer=mine, **way
    )
    assert mine.heard == theirs.heard and mine.heard[-1] == "end"


@pytest.mark.parametrize("way", WAYS)
def test_stopping_criteria_end_each_text(
    lm: PreTrainedModel, ours: Generate, way: dict[str, Any]
) -> None:
    args: dict[str, Any] = left_padded([PROMPT, [77, 78], [99] * 7])
    args |= {
        "max_new_tokens": 30,
        "do_sample": False,
        "stopping_criteria": [Ends(5)],
        "pad_token_id": 2,
    }
    expected = lm.generate(**args)
    assert expected.shape[1] < 37 and torch.equal(ours(**args, **way), expected)


def test_stop_strings_end_the_text(
    lm: PreTrainedModel, ours: Generate, model_dir: Path
) -> None:
    """The library loses the tokenizer on the way to a callable, and then requires it."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(model_dir / "tokenizer.json")
    )
    prompt = torch.tensor([PROMPT])
    text = tokenizer.decode(
        lm.generate(prompt, max_new_tokens=30, do_sample=False)[0, len(PROMPT) :]
    )
    args = {
        "max_new_tokens": 30,
        "do_sample": False,
        "stop_strings": [text[9:12]],
        "tokenizer": tokenizer,
    }
    expected = lm.generate(prompt, **args)
    assert expected.shape[1] < len(PROMPT) + 30
    assert torch.equal(ours(prompt, **args), expected)
    config = GenerationConfig(
        max_new_tokens=30, do_sample=False, stop_strings=[text[9:12]]
    )
    assert torch.equal(ours(prompt, config, tokenizer=tokenizer), expected)
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        ours(prompt, config)


def test_it_takes_what_generate_takes(lm: PreTrainedModel, ours: Generate) -> None:
    """A prompt by position, name or none; the default length; a dict; many sequences; a prefix constraint."""
    prompt = torch.tensor([PROMPT])
    expected = lm.generate(prompt)
    assert torch.equal(ours(prompt), expected) and torch.equal(
        ours(input_ids=prompt), expected
    )
    output = ours(inputs=prompt, return_dict_in_generate=True)
    assert type(output) is type(lm.generate(prompt, return_dict_in_generate=True))
    assert torch.equal(output.sequences, expected)
    assert torch.equal(ours(max_new_tokens=5), lm.generate(max_new_tokens=5))
    assert torch.equal(ours(prompt, max_length=9), lm.generate(prompt, max_length=9))
    many = torch.tensor([[token, token + 1] for token in range(20, 32)])
    assert torch.equal(
        ours(many, max_new_tokens=5), lm.generate(many, max_new_tokens=5)
    )
    allowed = {
        "prefix_allowed_tokens_fn": lambda b, ids: [20 + len(ids), 30],
        "max_new_tokens": 7,
    }
    assert torch.equal(ours(prompt, **allowed), lm.generate(prompt, **allowed))


def test_a_given_custom_generate_goes_first(
    lm: PreTrainedModel, ours: Generate
) -> None:
    """`model.generate` may be this function, in a model loaded with trust_remote_code."""
    seen = {}

    def other(
        model: PreTrainedModel, input_ids: Tensor, k: int = 0, **args: Any
    ) -> Tensor:
        seen.update(model=model, k=k)
        return input_ids

    assert torch.equal(
        ours(torch.tensor([PROMPT]), custom_generate=other, k=4), torch.tensor([PROMPT])
    )
    assert seen == {"model": lm, "k": 4}


@given(st.lists(IDS, min_size=1, max_size=4), st.data())
def test_prompts_are_rows_without_padding(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    batch = left_padded(prompts)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert prompts_of(ids, mask, None) == prompts
    assert prompts_of(ids, mask, (mask.cumsum(1) - 1).clamp(min=0)) == prompts
    other = torch.tensor(
        data.draw(
            st.lists(
                st.sampled_from([0, 1]), min_size=ids.numel(), max_size=ids.numel()
            )
        )
    )
    other = other.view_as(mask)
    left = all(sorted(row) == row and row[-1] for row in other.tolist())
    if left:
        assert all(prompts_of(ids, other, None))
    else:
        with pytest.raises(ValueError, match="attention_mask"):
            prompts_of(ids, other, None)


def test_k_of_training_fits_the_context(lm: PreTrainedModel, ours: Generate) -> None:
    """Near the end of the context a call without k was refused."""
    left = 2
    prompt = torch.tensor(
        [[13 + id % 300 for id in range(lm.config.max_position_embeddings - left)]]
    )
    args: dict[str, Any] = {"max_new_tokens": left, "do_sample": False}
    for probes in ("root", "all", 1):
        assert torch.equal(
            ours(prompt, **args, probes=probes), lm.generate(prompt, **args)
        )
    with pytest.raises(
        ValueError, match="k must be at most the 2 tokens left in the context, got 3"
    ):
        ours(prompt, **args, probes="root", k=3)


def test_a_request_s_temperature_samples(ours: Generate, lm: PreTrainedModel) -> None:
    """`transformers serve` puts temperature into a config without do_sample: 0.8 was decoded greedily."""
    prompt, args = torch.tensor([PROMPT]), {"max_new_tokens": 20, "top_k": 0}
    greedy = ours(prompt, max_new_tokens=20, do_sample=False)
    expected = ours(prompt, **args, do_sample=True, temperature=1.4, seed=5)
    assert not torch.equal(expected, greedy)
    request = GenerationConfig(temperature=1.4, **args)
    assert torch.equal(ours(prompt, generation_config=request, seed=5), expected)
    for config in (
        GenerationConfig(temperature=1.4, do_sample=False, **args),
        GenerationConfig(**args),
        lm.generation_config,
    ):
        assert torch.equal(
            ours(prompt, generation_config=config, max_new_tokens=20, seed=5), greedy
        )
