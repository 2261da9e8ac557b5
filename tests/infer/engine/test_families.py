"""Every family against the library's own forward with its own attention; the others by name."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from conf import UserError
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.policy import FixedBudget
from infer.engine.attention import band
from infer.engine.families import TOLERANCE, check_family, check_tree
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.loop import Drafters, Limits, decode
from infer.models.checkpoint import ModelDirectory
from infer.trees.tree import Tree
from tests.infer.drafters import test_draft_model as by_draft
from tests.infer.library import by_library, collect, logits_of
from tests.infer.trees.test_tree import path_to

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
}
SIZES |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
SIZES |= {
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
ABOVE = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
OPT, THETA = {"ffn_dim": 64, "init_std": 0.3}, {"rope_theta": 1e6}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "codellama": (
        "llama",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "llama, scaled": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows above": ("qwen2", ABOVE),
    "qwen3": ("qwen3", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "starcoder2, window": ("starcoder2", {"sliding_window": 6, "use_bias": True}),
    # Its attention hears of no window but by the mask: long prompts were read without.
    "qwen2_moe, windows": ("qwen2_moe", ABOVE | EXPERTS),
    "opt": ("opt", OPT),
    "opt, projected": (
        "opt",
        OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "bloom, six heads": ("bloom", {"n_layer": 2, "n_head": 6, "hidden_size": 48}),
}
KINDS_OF_POSITIONS = ["llama", "mistral, window", "opt, projected", "bloom"]
REFUSED = {
    "gemma2": ({}, "logits are capped"),
    "gemma3": ({}, "takes more than text"),
    "mamba": ({}, "layers other than attention"),
    "rwkv": ({}, "layers other than attention"),
    "t5": ({}, "no decoder-only language model"),
    "mpt": ({}, "takes no mask of ours"),
    "llama4_text": ({}, "chunked_attention"),
    "phi3": (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "long_factor": [2.0] * 48,
                "short_factor": [1.0] * 48,
            }
        },
        "change with the text's length",
    ),
    "llama": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "change with the text's length",
    ),
}
# Neither by level nor by path: columns are no positions, and their order is not that of the depths.
TREE = Tree((7, 3, 9, 9, 30, 4), (-1, 0, 0, 1, 3, 2), 6).probe((0, 4), (90, 90))
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
    for parameter in lm.parameters():  # biases and norms begin as nothing
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return lm.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_has_the_logits_of_its_path_decoded_alone(family: str) -> None:
    """Prompts longer than the window and shorter ones side by side, by both ways through the model."""
    kind, settings = FAMILIES[family]
    lm = tiny(kind, **settings)
    check_family(lm.config)
    check_tree(lm)
    runner = Runner(lm, capacity=64, max_rows=16, batch=3)
    runner.prefill(PROMPTS)
    result = logits_of(runner, [TREE] * 3)
    for prompt, logits in zip(PROMPTS, result):
        for node in range(len(TREE.tokens)):
            expected = by_library(
                lm, [*prompt, *(TREE.tokens[i] for i in path_to(TREE, node))]
            )
            torch.testing.assert_close(logits[node], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", KINDS_OF_POSITIONS)
def test_in_bfloat16_every_token_is_the_librarys_or_a_near_tie(family: str) -> None:
    """The output, forced through the library's own forward in the same type."""
    kind, settings = FAMILIES[family]
    lm = tiny(kind, **settings).to(torch.bfloat16)
    check_tree(lm)
    for static in (False, True):
        for prompt, text in zip(PROMPTS, texts(lm, static)):
            with torch.inference_mode():
                logits = (
                    lm(torch.tensor([[*prompt, *text]]))
                    .logits[0, len(prompt) - 1 : -1]
                    .float()
                )
            below = logits.amax(1) - logits.gather(1, torch.tensor(text)[:, None])[:, 0]
            assert (below <= TOLERANCE[2] * (logits.amax(1) - logits.amin(1))).all()


@pytest.mark.parametrize("static", [False, True], ids=["as they come", "fixed shapes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_is_the_librarys(family: str, static: bool) -> None:
    """Every prompt of a batch, drafted by random probes and by a draft model of the family."""
    kind, settings = FAMILIES[family]
    lm = tiny(kind, **settings)
    expected = [by_generate(lm, prompt) for prompt in PROMPTS]
    assert texts(lm, static) == expected
    drafters = by_draft.drafters_of(
        by_draft.a_draft_of(lm, 0.1), "gsd", FixedBudget(12), static=static
    )
    requests = [Request(prompt) for prompt in PROMPTS]
    result, accepted = by_draft.texts(lm, requests, drafters, Limits(30, [1]))
    assert result == expected and accepted > 5


def texts(lm: PreTrainedModel, static: bool) -> list[list[int]]:
    """Of the prompts, drafted by random probes."""
    new = partial(AdaptiveDrafter, [90], FixedPolicy(3, "all", nodes=6, width=3))
    runner = Runner(lm, capacity=64, max_rows=new().max_rows, batch=3, static=static)
    requests = [Request(prompt) for prompt in PROMPTS]
    return collect(decode(runner, requests, Drafters(new), Limits(30, eos=[1])), 3)[0]


def by_generate(lm: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([list(prompt)])
    whole = lm.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=30,
        pad_token_id=1,
    )
    return whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_trees_do_not_suit_is_refused_by_name_before_its_weights_are_read(
    kind: str,
) -> None:
    settings, reason = REFUSED[kind]
    with pytest.raises(
        UserError, match=rf"must be a causal model .*got {kind}.*{reason}"
    ):
        check_family(AutoConfig.for_model(kind, **settings))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("cohere", {"logit_scale": 0.1}), ("granite", {"logits_scaling": 8.0})],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_logits_are_found_by_trying(
    kind: str, settings: dict[str, float], dtype: torch.dtype
) -> None:
    with pytest.raises(
        UserError, match=f"{kind}, whose logits of a tree are not those of its paths"
    ):
        check_tree(tiny(kind, **settings).to(dtype))


def test_attention_with_more_than_a_mask_is_found_by_trying() -> None:
    """What a model hands to its attention beyond masks and windows must not silently be left out."""
    lm = tiny("gpt_oss", num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(
        UserError, match="gpt_oss, which could not be tried with a tree .*s_aux"
    ):
        check_tree(lm)


def test_want_of_memory_is_no_fault_of_the_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What PyTorch raises for a CPU's memory, a RuntimeError, was reported as an unsupported architecture."""

    full = RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 2 bytes."
    )
    monkeypatch.setattr("infer.engine.families._tree_logits", Mock(side_effect=full))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        check_tree(tiny("llama"))


def test_a_model_directory_with_a_window_loads(tmp_path: Path) -> None:
    """A prompt's mask of n x n bytes stayed in the device's memory when the model was long freed."""
    tiny("mistral", sliding_window=6).save_pretrained(tmp_path)
    lm = ModelDirectory(tmp_path).load(dtype="float32", device="cpu")
    runner = Runner(lm, capacity=16, max_rows=1)
    runner.prefill([PROMPTS[0]])
    assert band.cache_info().currsize == 0
    (logits,) = logits_of(runner, [Tree.chain(7)])
    torch.testing.assert_close(
        logits[0], by_library(lm, [*PROMPTS[0], 7]), rtol=1e-4, atol=1e-4
    )
    tiny("cohere").save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=rf"^model={tmp_path} must be a causal model .* got cohere"
    ):
        ModelDirectory(tmp_path).load(dtype="float32", device="cpu")
