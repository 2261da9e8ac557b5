"""Test every family against Transformers' forward and generate; other families are refused."""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
)

from conf.errors import UserError
from infer.drafters.planner import FixedPlanner
from infer.engine.families import TOLERANCE, check_family, check_tree
from infer.engine.output import Request
from infer.loop import Limits
from tests.infer.drafters import test_draft_model as by_draft
from tests.infer.library import BOTH_SHAPES, by_tokens, collect, steps_of

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7}
MULTIPLIERS |= {"attention_multiplier": 0.4, "logits_scaling": 3.0}
ABOVE = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LATENT = {"kv_lora_rank": 16, "v_head_dim": 12, "num_key_value_heads": 4}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "first_k_dense_replace": 1}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT |= {"q_lora_rank": 16, "n_group": 2, "topk_group": 1}
OPT = {"ffn_dim": 64, "init_std": 0.3}
PROJECTED = {"word_embed_proj_dim": 16, "do_layer_norm_before": False}
LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, scaled": ("llama", LINEAR | {"num_key_value_heads": 4}),
    "mistral, window": ("mistral", {"sliding_window": 6}),
    "qwen2, windows above": ("qwen2", ABOVE),
    "qwen3": ("qwen3", {}),
    "starcoder2, window": ("starcoder2", {"sliding_window": 6, "use_bias": True}),
    # Its attention knows of windows only by the mask.
    "qwen2_moe, windows": ("qwen2_moe", ABOVE | EXPERTS),
    "opt": ("opt", OPT),
    "opt, projected": ("opt", OPT | PROJECTED),
    # It takes a view of attention's output, which was not contiguous.
    "afmoe": ("afmoe", EXPERTS),
    "granite, scaled": ("granite", MULTIPLIERS),
    "cohere2, scaled, windows": ("cohere2", MIXED | {"logit_scale": 0.3}),
    "deepseek_v3, latent": ("deepseek_v3", LATENT),
    "gpt_bigcode": ("gpt_bigcode", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
}
#: Refused by a tree's logits, if the check of the architecture had let them pass.
REFUSED = {
    "gemma2": ({}, "fails on a tree .*softcap"),
    "nanochat": ({}, "other logits for a tree than for its paths"),
    "gpt_oss": ({"num_local_experts": 2, "num_experts_per_tok": 1}, ".*s_aux"),
}
PROMPTS = [
    [5, 17, 3, 88, 41, 22, 60, 9, 14, 77, 8, 2],
    [44, 6, 13],
    [30, 31, 32, 33, 34, 35, 36, 37],
]


def tiny(kind: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    known = AutoConfig.for_model(kind).to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    lm = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **sizes | settings)
    )
    for parameter in lm.parameters():  # biases and norms are constant at first
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return lm.eval()


def tiny_family(family: str) -> PreTrainedModel:
    kind, settings = FAMILIES[family]
    return tiny(kind, **settings)


def texts(lm: PreTrainedModel, static: bool) -> list[list[int]]:
    """Decode the prompts as a batch, with drafts by random probes."""
    new = partial(by_tokens, [90], FixedPlanner(3, "all", nodes=6, width=3))
    requests = [Request(prompt) for prompt in PROMPTS]
    return collect(steps_of(lm, new, requests, tokens=30, static=static), 3)[0]


def by_generate(lm: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([list(prompt)])
    whole = lm.generate(ids, do_sample=False, max_new_tokens=30, pad_token_id=1)
    return whole[0, len(prompt) :].tolist()


@BOTH_SHAPES
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_is_the_librarys(family: str, static: bool) -> None:
    """A batch of prompts longer and shorter than the window, two kinds of drafters."""
    lm = tiny_family(family)
    check_family(lm.config)
    check_tree(lm)
    expected = [by_generate(lm, prompt) for prompt in PROMPTS]
    assert texts(lm, static) == expected
    drafters = by_draft.drafters_of(
        by_draft.a_draft_of(lm, 0.1), "gsd", FixedPlanner(nodes=12), static=static
    )
    requests = [Request(prompt) for prompt in PROMPTS]
    result, accepted = by_draft.texts(lm, requests, drafters, Limits(30, [1]))
    assert result == expected and accepted > 5


@BOTH_SHAPES
@pytest.mark.parametrize("family", ["llama", "mistral, window", "opt, projected"])
def test_in_bfloat16_every_token_is_the_librarys_or_a_near_tie(
    family: str, static: bool
) -> None:
    """The output is compared with the library's own forward of the output, in the same dtype."""
    lm = tiny_family(family).to(torch.bfloat16)
    check_tree(lm)
    for prompt, text in zip(PROMPTS, texts(lm, static)):
        with torch.inference_mode():
            logits = lm(torch.tensor([[*prompt, *text]])).logits[0]
        logits = logits[len(prompt) - 1 : -1].float()
        below = logits.amax(1) - logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert (below <= TOLERANCE[2] * (logits.amax(1) - logits.amin(1))).all()


@pytest.mark.parametrize("kind", REFUSED)
def test_an_unsuited_architecture_is_refused_by_name(kind: str) -> None:
    settings, reason = REFUSED[kind]
    with pytest.raises(UserError, match=f"a causal model .*got {kind}, .*{reason}"):
        check_tree(tiny(kind, **settings))


@torch.no_grad()
def test_weights_that_compute_nan_are_named(llama: LlamaForCausalLM) -> None:
    """Bug: the message said that the attention cannot follow a tree, difference nan, allowed nan.

    A training that diverged, or an overflow in float16, has such logits.
    """
    damaged = deepcopy(llama)
    damaged.lm_head.weight[5, 0] = torch.nan
    with pytest.raises(UserError, match="finite logits, got NaN .* in float32"):
        check_tree(damaged, "model=x")
