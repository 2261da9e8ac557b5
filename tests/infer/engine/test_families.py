"""Every family against the library's own forward with its own attention; the others by name."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from conf import UserError
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.budget import FixedBudget
from infer.engine.attention import band
from infer.engine.families import TOLERANCE, check_family, check_tree
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.loop import Drafter, Drafters, Limits, decode
from infer.models.checkpoint import load_model
from infer.trees.tree import Tree
from tests.infer.drafters import test_draft_model as by_draft
from tests.infer.engine.test_runner import by_library, logits_of
from tests.infer.trees.test_tree import path_to

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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} | {
    "shared_expert_intermediate_size": 16
}
FAMILIES = {
    "llama": ("llama", {}),
    "codellama": (
        "llama",
        {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "llama, scaled": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows above": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "starcoder2, window": ("starcoder2", {"sliding_window": 6, "use_bias": True}),
    "qwen2_moe, windows": (  # its attention hears of no window but by the mask: long prompts were read without
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, **EXPERTS},
    ),
    "opt": ("opt", {"ffn_dim": 64, "init_std": 0.3}),
    "opt, projected": (
        "opt",
        {"ffn_dim": 64, "init_std": 0.3, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
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
        {"rope_parameters": {"rope_type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48}},
        "change with the text's length",
    ),
    "llama": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "change with the text's length"),
}
# Neither by level nor by path: columns are no positions, and their order is not that of the depths.
TREE = Tree((7, 3, 9, 9, 30, 4), (-1, 0, 0, 1, 3, 2), 6).probe((0, 4), (90, 90))
PROMPTS = [[5, 17, 3, 88, 41, 22, 60, 9, 14, 77, 8, 2], [44, 6, 13], [30, 31, 32, 33, 34, 35, 36, 37]]


def tiny(kind: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    known = AutoConfig.for_model(kind).to_dict()
    config = AutoConfig.for_model(
        kind, **{k: v for k, v in {**SIZES, **settings}.items() if k in known or k in settings}
    )
    lm = AutoModelForCausalLM.from_config(config)
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
            expected = by_library(lm, [*prompt, *(TREE.tokens[i] for i in path_to(TREE, node))])
            torch.testing.assert_close(logits[node], expected, rtol=1e-4, atol=1e-4)


def test_the_mask_of_a_prompt_with_windows_is_not_kept() -> None:
    """That of the last prompt stayed, n x n bytes of the device's memory, when the model was long freed."""
    kind, settings = FAMILIES["mistral, window"]
    runner = Runner(tiny(kind, **settings), capacity=64, max_rows=1)
    runner.prefill([list(range(1, 30))])
    assert band.cache_info().currsize == 0


@pytest.mark.parametrize("family", KINDS_OF_POSITIONS)
def test_a_tree_fed_in_parts_has_the_same(family: str) -> None:
    """As a draft model's is: the root and its children first, then what hangs under them."""
    kind, settings = FAMILIES[family]
    lm = tiny(kind, **settings)
    n = TREE.probes_from
    for static in (False, True):
        runner = Runner(lm, capacity=64, max_rows=16, batch=3, static=static)
        runner.prefill(PROMPTS)
        for first, last in ((0, 3), (3, n)):
            part = Tree(TREE.tokens[:last], TREE.parents[:last], last)
            requests = [Request(prompt) for prompt in PROMPTS]
            output = runner.forward([part] * 3, requests, Sampling(), [first] * 3)
            for b, prompt in enumerate(PROMPTS):
                nodes = range(first, last)
                for node, chances in zip(nodes, output.next_candidates(b, nodes, 5).weights):
                    logits = by_library(lm, [*prompt, *(TREE.tokens[i] for i in path_to(TREE, node))])
                    expected = logits.softmax(-1).topk(5).values
                    torch.testing.assert_close(torch.tensor(chances), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", KINDS_OF_POSITIONS)
def test_in_bfloat16_every_token_is_the_librarys_or_a_near_tie(family: str) -> None:
    """The output, forced through the library's own forward in the same type."""
    kind, settings = FAMILIES[family]
    lm = tiny(kind, **settings).to(torch.bfloat16)
    check_tree(lm)
    requests = [Request(prompt) for prompt in PROMPTS]
    new = partial(AdaptiveDrafter, [90], FixedPolicy(3, "all", nodes=6, width=3))
    for static in (False, True):
        for prompt, text in zip(PROMPTS, texts(lm, requests, new, static)):
            with torch.inference_mode():
                logits = lm(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1].float()
            below = logits.amax(1) - logits.gather(1, torch.tensor(text)[:, None])[:, 0]
            assert (below <= TOLERANCE[2] * (logits.amax(1) - logits.amin(1))).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_is_the_librarys(family: str) -> None:
    """Every prompt of a batch, drafted by random probes, and through fixed shapes too."""
    kind, settings = FAMILIES[family]
    lm = tiny(kind, **settings)
    requests = [Request(prompt) for prompt in PROMPTS]
    new = partial(AdaptiveDrafter, [90], FixedPolicy(3, "all", nodes=6, width=3))
    for static in (False, True):
        assert texts(lm, requests, new, static) == [by_generate(lm, prompt) for prompt in PROMPTS]


def texts(
    lm: PreTrainedModel, requests: Sequence[Request], new: Callable[[], Drafter], static: bool
) -> list[list[int]]:
    runner = Runner(lm, capacity=64, max_rows=new().max_rows, batch=3, static=static)
    result: list[list[int]] = [[] for _ in requests]
    for steps in decode(runner, requests, Drafters(new), Limits(30, eos=[1])):
        for step in steps:
            result[step.sequence] += step.tokens
    return result


def by_generate(lm: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([list(prompt)])
    whole = lm.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30, pad_token_id=1
    )
    return whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_trees_do_not_suit_is_refused_by_name_before_its_weights_are_read(kind: str) -> None:
    settings, reason = REFUSED[kind]
    with pytest.raises(UserError, match=rf"must be a causal model .*got {kind}.*{reason}"):
        check_family(AutoConfig.for_model(kind, **settings))


@pytest.mark.parametrize(
    ("kind", "settings"), [("cohere", {"logit_scale": 0.1}), ("granite", {"logits_scaling": 8.0})]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_logits_are_found_by_trying(kind: str, settings: dict[str, float], dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match=f"{kind}, whose logits of a tree are not those of its paths"):
        check_tree(tiny(kind, **settings).to(dtype))


def test_attention_with_more_than_a_mask_is_found_by_trying() -> None:
    """What a model hands to its attention beyond masks and windows must not silently be left out."""
    lm = tiny("gpt_oss", num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(UserError, match="gpt_oss, which could not be tried with a tree .*s_aux"):
        check_tree(lm)


def test_want_of_memory_is_no_fault_of_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch raises for a CPU's memory, a RuntimeError, was reported as an unsupported architecture."""

    def full(*args: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2 bytes.")

    monkeypatch.setattr("infer.engine.families._tree_logits", full)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        check_tree(tiny("llama"))


def test_a_model_directory_with_a_window_loads(tmp_path: Path) -> None:
    tiny("mistral", sliding_window=6).save_pretrained(tmp_path)
    lm = load_model(tmp_path, dtype="float32", device="cpu")
    runner = Runner(lm, capacity=16, max_rows=1)
    runner.prefill([PROMPTS[0]])
    (logits,) = logits_of(runner, [Tree.chain(7)])
    torch.testing.assert_close(logits[0], by_library(lm, [*PROMPTS[0], 7]), rtol=1e-4, atol=1e-4)
    tiny("cohere").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"^model={tmp_path} must be a causal model .* got cohere"):
        load_model(tmp_path, dtype="float32", device="cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_with_a_draft_model_of_the_family_is_the_librarys(family: str) -> None:
    """The draft model's levels are fed in parts, whose positions and biases are the graph's."""
    kind, settings = FAMILIES[family]
    lm = tiny(kind, **settings)
    requests = [Request(prompt) for prompt in PROMPTS]
    for static in (False, True):
        drafters = by_draft.drafters_of(by_draft.a_draft_of(lm, 0.1), "gsd", FixedBudget(12), static=static)
        result, accepted = by_draft.texts(lm, requests, drafters, Limits(30, [1]))
        assert accepted > 5
        assert result == [by_generate(lm, prompt) for prompt in PROMPTS]
