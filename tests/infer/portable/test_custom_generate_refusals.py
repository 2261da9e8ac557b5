"""What `model.generate` by this decoder refuses, in a sentence that names the argument."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from tests.infer.library import PROMPT, Ends, Generate, Listener, drafting, left_padded

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": (
        {"input_ids": torch.zeros(1, 0, dtype=torch.long)},
        "input_ids must have at least one token",
    ),
    "no row": (
        {"input_ids": torch.zeros(0, 3, dtype=torch.long)},
        "input_ids must have at least one token",
    ),
    "far drafts": (
        {"k": 2**32, "probes": "root"},
        "k must be at most the 508 tokens .* got 4294967296",
    ),
    "beams": ({"num_beams": 2}, "must decode greedily or sample, got beam_search"),
    "groups": ({"num_beams": 2, "do_sample": True}, "got beam_sample"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "got assisted_generation"),
    "a helper": ({"assistant_model": "lm"}, "assistant_model must be None"),
    "a cache": ({"past_key_values": "cache"}, "past_key_values must be None"),
    "a kind of cache": (
        {"cache_implementation": "static"},
        "cache_implementation must be None",
    ),
    "scores": (
        {"output_scores": True, "return_dict_in_generate": True},
        "output_scores must be False",
    ),
    "guidance": (
        {"guidance_scale": 2.0},
        "logits_processor must be functions .* got Unbatched",
    ),
    "embeddings": (
        {"inputs_embeds": torch.zeros(1, 4, 32)},
        "inputs_embeds must be None.* token ids",
    ),
    "positions": (
        {"position_ids": torch.tensor([[4, 5, 6, 7]])},
        "position_ids must count from 0",
    ),
    "right padding": (
        {"attention_mask": torch.tensor([[1, 1, 1, 0]])},
        "padding_side='left'",
    ),
    "an empty prompt": (
        {"attention_mask": torch.tensor([[0, 0, 0, 0]])},
        "padding_side='left'",
    ),
    "k": ({"k": 0}, "k must be at least 1 adaptive tokens, got 0"),
    "probes": (
        {"probes": "some"},
        "probes must be auto, root, all or a number .* got 'some'",
    ),
    "no probes": ({"probes": 0}, "probes must be auto, root, all or a number"),
    "seed": ({"seed": -1}, "seed must be a number of up to 63 bits, got -1"),
    "no number": ({"k": "3"}, "k must be a whole number, got '3'"),
    "half a draft": ({"k": 2.5}, "k must be a whole number, got 2.5"),
    "yes to probes": ({"probes": True}, "probes must be a whole number, got True"),
    "half a seed": ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
    "healing": (
        {"token_healing": True, "tokenizer": "given"},
        "token_healing must be False",
    ),
    "healing by config": (
        {"generation_config": GenerationConfig(token_healing=True)},
        "token_healing must be",
    ),
    "beyond the context": (
        {"max_new_tokens": 300_000},
        r"max_new_tokens .* the model's context of 512, got 4 \+ 300000",
    ),
    "a typo": ({"max_new_token": 5}, "max_new_token"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_it_cannot_do_is_refused_in_a_sentence(
    ours: Generate, lm: PreTrainedModel, name: str
) -> None:
    """Among them tracebacks (k="3", seed="a"), k=True as a number, and 2 GB of cache for 300,000 tokens."""
    args, sentence = REFUSALS[name]
    with pytest.raises(ValueError, match=sentence) as error:
        ours(**{"input_ids": torch.tensor([PROMPT])} | args)
    assert "\n" not in str(error.value)
    assert lm.config._attn_implementation == "sdpa"


def test_the_context_may_be_filled_to_its_end(
    lm: PreTrainedModel, ours: Generate
) -> None:
    """The longest prompt, without padding, and the new tokens may have the context's length."""
    args: dict[str, Any] = left_padded([PROMPT, [7]]) | {"do_sample": False}
    assert torch.equal(
        ours(**args, max_new_tokens=508), lm.generate(**args, max_new_tokens=508)
    )
    with pytest.raises(ValueError, match=r"context of 512, got 4 \+ 509"):
        ours(**args, max_length=513)


def test_a_config_s_length_ends_at_the_context(
    lm: PreTrainedModel, ours: Generate, caplog: pytest.LogCaptureFixture
) -> None:
    """`transformers serve` asks for 1,024 new tokens: every request to a model of that context was refused."""
    prompt = torch.tensor([PROMPT])
    config = GenerationConfig(max_new_tokens=1024, do_sample=False)
    expected = lm.generate(prompt, max_new_tokens=508, do_sample=False)
    assert torch.equal(ours(prompt, generation_config=config), expected)
    assert "exceeds the model's context of 512: the text ends after 508" in caplog.text
    with pytest.raises(ValueError, match=r"context of 512, got 512 \+ 1024"):
        ours(torch.full((1, 512), 7), generation_config=config)


def test_numbers_of_other_libraries_are_numbers(ours: Generate) -> None:
    args: dict[str, Any] = {
        "inputs": torch.tensor([PROMPT]),
        "max_new_tokens": 9,
        "do_sample": True,
    }
    result = ours(**args, k=np.int64(2), probes=torch.tensor(1), seed=np.uint8(5))
    assert torch.equal(result, ours(**args, k=2, probes=1, seed=5))


def test_what_several_texts_at_once_cannot_have(
    ours: Generate, lm: PreTrainedModel
) -> None:
    two = torch.tensor([PROMPT, PROMPT])
    with pytest.raises(ValueError, match="streamer must have one sequence, got 2"):
        ours(two, streamer=Listener())
    with pytest.raises(
        ValueError, match="prefix_allowed_tokens_fn must have one sequence"
    ):
        ours(two, prefix_allowed_tokens_fn=lambda b, ids: [3])
    config = GenerationConfig(eos_token_id=None, max_new_tokens=3)
    before, lm.generation_config = lm.generation_config, GenerationConfig()
    try:
        with pytest.raises(
            ValueError, match="pad_token_id must be set for 2 sequences"
        ):
            ours(two, config, stopping_criteria=[Ends(5)])
        assert ours(two, config).shape == (2, 7)
    finally:
        lm.generation_config = before


def test_another_models_adaptive_ids_are_refused(lm: PreTrainedModel) -> None:
    with pytest.raises(
        ValueError, match="model must have the adaptive id 400, got 400 ids"
    ):
        drafting(lm, 400)(torch.tensor([PROMPT]))
