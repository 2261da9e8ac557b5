"""What `model.generate` by this decoder refuses, in a sentence that names the argument."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from tests.infer.engine.test_families import REFUSED
from tests.infer.library import PROMPT, Ends, Generate, Listener, drafting, left_padded

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "wanted greedy decoding or sampling, found what asks for beam_search"),
    "groups": ({"num_beams": 2, "do_sample": True}, "found what asks for beam_sample"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "found what asks for assisted_generation"),
    "a helper": ({"assistant_model": "lm"}, "assistant_model, past_key_values: wanted none"),
    "a cache": ({"past_key_values": "cache"}, "assistant_model, past_key_values: wanted none"),
    "a kind of cache": ({"cache_implementation": "static"}, "cache_implementation: wanted none"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores: wanted tokens alone"),
    "guidance": ({"guidance_scale": 2.0}, "logits_processor: wanted functions .* found Unbatched"),
    "embeddings": (
        {"inputs_embeds": torch.zeros(1, 4, 32)},
        "inputs_embeds: wanted a prompt of token ids",
    ),
    "positions": ({"position_ids": torch.tensor([[4, 5, 6, 7]])}, "position_ids: wanted none, or those from 0"),
    "right padding": ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "padding_side='left'"),
    "an empty prompt": ({"attention_mask": torch.tensor([[0, 0, 0, 0]])}, "padding_side='left'"),
    "k": ({"k": 0}, "k must be at least 1 adaptive tokens, got 0"),
    "probes": (
        {"probes": "some"},
        "probes: wanted auto, root, all or a number .* found 'some'",
    ),
    "no probes": ({"probes": 0}, "probes: wanted auto, root, all or a number"),
    "seed": ({"seed": -1}, "seed: wanted a number of up to 63 bits, found -1"),
    "no number": ({"k": "3"}, "k: wanted a whole number, found '3'"),
    "half a draft": ({"k": 2.5}, "k: wanted a whole number, found 2.5"),
    "a yes": ({"k": True}, "k: wanted a whole number, found True"),
    "yes to probes": ({"probes": True}, "probes: wanted a whole number, found True"),
    "half a probe": ({"probes": 1.5}, "probes: wanted a whole number, found 1.5"),
    "a seed's name": ({"seed": "a"}, "seed: wanted a whole number, found 'a'"),
    "half a seed": ({"seed": 1.5}, "seed: wanted a whole number, found 1.5"),
    "a yes for a seed": ({"seed": False}, "seed: wanted a whole number, found False"),
    "healing": ({"token_healing": True, "tokenizer": "given"}, "token_healing: wanted none"),
    "healing by config": ({"generation_config": GenerationConfig(token_healing=True)}, "token_healing: wanted"),
    "beyond the context": (
        {"max_new_tokens": 300_000},
        r"max_new_tokens.*: wanted .* the model's context of 512, found 4 \+ 300000",
    ),
    "a typo": ({"max_new_token": 5}, "max_new_token"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_it_cannot_do_is_refused_in_a_sentence(ours: Generate, lm: PreTrainedModel, name: str) -> None:
    """Among them what were tracebacks (k="3", seed="a"), what was taken as a number (k=True), a complaint
    about a tokenizer that had been given (token_healing), and 2 GB of cache for 300,000 tokens of which 6 came.
    """
    asked, sentence = REFUSALS[name]
    with pytest.raises(ValueError, match=sentence) as told:
        ours(torch.tensor([PROMPT]), **asked)
    assert "\n" not in str(told.value)
    assert lm.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("shape", [(1, 0), (0, 3)])
def test_prompts_without_a_token_are_refused(ours: Generate, shape: tuple[int, int]) -> None:
    """They were an IndexError of argmax's, and a ValueError of max()'s."""
    with pytest.raises(ValueError, match="input_ids: wanted at least one token, found the shape"):
        ours(torch.zeros(shape, dtype=torch.long), max_new_tokens=3)


def test_the_context_may_be_filled_to_its_end(lm: PreTrainedModel, ours: Generate) -> None:
    """The last length that is taken is the context's, of the longest prompt, without what fills it up."""
    asked: dict[str, Any] = left_padded([PROMPT, [7]]) | {"do_sample": False}
    assert torch.equal(ours(**asked, max_new_tokens=508), lm.generate(**asked, max_new_tokens=508))
    with pytest.raises(ValueError, match=r"context of 512, found 4 \+ 509"):
        ours(**asked, max_length=513)


def test_a_config_s_length_ends_at_the_context(
    lm: PreTrainedModel, ours: Generate, caplog: pytest.LogCaptureFixture
) -> None:
    """`transformers serve` asks for 1,024 new tokens by default: every request to a model with such a context
    was refused.
    """
    prompt = torch.tensor([PROMPT])
    config = GenerationConfig(max_new_tokens=1024, do_sample=False)
    wanted = lm.generate(prompt, max_new_tokens=508, do_sample=False)
    assert torch.equal(ours(prompt, generation_config=config), wanted)
    assert "exceeds the model's context of 512: the text ends after 508" in caplog.text
    with pytest.raises(ValueError, match=r"context of 512, found 512 \+ 1024"):
        ours(torch.full((1, 512), 7), generation_config=config)


def test_k_beyond_the_context_takes_no_memory(lm: PreTrainedModel) -> None:
    """One adaptive token serves any k: 2^32 drafts in a row took the memory of as many ids."""
    ours, asked = drafting(lm, 6), {"inputs": torch.tensor([PROMPT]), "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(ValueError, match="k: wanted at most the 508 tokens .* found 4294967296"):
        ours(**asked, k=2**32, probes="root")
    assert torch.equal(ours(**asked, k=2**32), lm.generate(**asked))


def test_numbers_of_other_libraries_are_numbers(ours: Generate) -> None:
    asked: dict[str, Any] = {"inputs": torch.tensor([PROMPT]), "max_new_tokens": 9, "do_sample": True}
    found = ours(**asked, k=np.int64(2), probes=torch.tensor(1), seed=np.uint8(5))
    assert torch.equal(found, ours(**asked, k=2, probes=1, seed=5))


def test_what_several_texts_at_once_cannot_have(ours: Generate, lm: PreTrainedModel) -> None:
    two = torch.tensor([PROMPT, PROMPT])
    with pytest.raises(ValueError, match="streamer: wanted one sequence with it, found 2"):
        ours(two, streamer=Listener())
    with pytest.raises(ValueError, match="prefix_allowed_tokens_fn: wanted one sequence"):
        ours(two, prefix_allowed_tokens_fn=lambda b, ids: [3])
    config = GenerationConfig(eos_token_id=None, max_new_tokens=3)
    before, lm.generation_config = lm.generation_config, GenerationConfig()
    try:
        with pytest.raises(ValueError, match="pad_token_id: wanted one for 2 sequences"):
            ours(two, config, stopping_criteria=[Ends(5)])
        assert ours(two, config).shape == (2, 7)
    finally:
        lm.generation_config = before


def test_another_models_adaptive_ids_are_refused(lm: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="wanted the one of these adaptive tokens, found no id 400 among"):
        drafting(lm, 400)(torch.tensor([PROMPT]))


@pytest.mark.parametrize("family", ["gemma2", "mpt"])
def test_other_families_are_refused_by_name(family: str) -> None:
    settings, reason = REFUSED[family]
    small = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 97, "d_model": 32, "n_layers": 1}
    config = AutoConfig.for_model(family, **small, **settings)
    lm = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=f"must be a causal model whose attention follows a tree.*{reason}"):
        drafting(lm, 5)(torch.tensor([PROMPT]), max_new_tokens=3)
