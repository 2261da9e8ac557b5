"""Training and decoding refuse the same architectures for the same reasons."""

import pytest
from transformers import AutoConfig

from conf.architecture import (
    expert_blocks,
    passes_argument,
    skeleton,
    why_unsupported,
)
from conf.errors import UserError
from infer.engine.families import check_family, check_tree
from tests.infer.engine.test_families import EXPERTS, FAMILIES, SIZES, tiny
from train.pretrained import check_architecture

DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
REFUSED = {
    "gemma3": ({}, "takes more than text"),
    "t5": ({}, "is not a decoder-only"),
    "llama4_text": ({}, "chunked_attention"),
    "llama": (DYNAMIC, "depends on the length"),
    "gemma2": ({}, "attention with softcap"),
    "gpt_oss": ({"num_local_experts": 2, "num_experts_per_tok": 1}, "with s_aux"),
    "nanochat": ({}, "logits that are not its head"),
    "mimo_v2_flash": ({}, "keys and values of .* heads and widths"),
    "bert-generation": ({}, "is not causal"),
    "xglm": ({}, "does not call one of Transformers' attention"),
    "moshi": ({}, "a window of any length, but its .* sliding_window=3000"),
    "doge": ({}, "fails on a tree"),
    "jetmoe": ({}, "does not use Transformers' cache"),
}
#: Mixtures of experts that train and decode, in addition to the families of test_families.py.
MIXTURES = ["qwen3_moe", "mixtral", "olmoe", "granitemoe", "phimoe", "afmoe"]


def config_of(kind: str, **settings: object) -> object:
    known = AutoConfig.for_model(kind).to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    return AutoConfig.for_model(kind, **sizes | settings)


@pytest.mark.parametrize("kind", REFUSED)
def test_training_and_decoding_refuse_for_one_reason(kind: str) -> None:
    """A model was trained and exported as verified, and then `infer` refused it."""
    settings, reason = REFUSED[kind]
    config = config_of(kind, **settings)
    before = config.to_dict()
    with pytest.raises(UserError, match=f"got {kind}, .*{reason}") as decoding:
        check_family(config)
    with pytest.raises(UserError, match=f"got {kind}, .*{reason}") as training:
        check_architecture(config, seq_len=48)
    ends = [str(e.value).partition(f"got {kind}, ")[2] for e in (decoding, training)]
    assert ends[0] == ends[1] == f"{why_unsupported(config)}. Use another model."
    assert config.to_dict() == before


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_of_experts_that_trains_decodes(kind: str) -> None:
    known = AutoConfig.for_model(kind).to_dict()
    experts = {"num_experts": 4, "num_local_experts": 4, **EXPERTS}
    lm = tiny(kind, **{name: n for name, n in experts.items() if name in known})
    check_architecture(lm.config, seq_len=48)
    check_tree(lm)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_decodes_is_supported(family: str) -> None:
    kind, settings = FAMILIES[family]
    assert why_unsupported(config_of(kind, **settings)) == ""


def test_a_configuration_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of a 7B model took 1 s of CPU for a check that the process had already made.

    Another value in the configuration is another check.
    """
    config = config_of("llama", hidden_size=48)
    assert why_unsupported(config) == ""
    monkeypatch.setattr("conf.architecture.skeleton", None)
    copy = config_of("llama", hidden_size=48, name_or_path="copied")
    assert why_unsupported(copy) == ""
    assert "fails on a tree" in why_unsupported(config_of("llama", hidden_size=96))


def test_arguments_of_a_decoder_that_attention_gets() -> None:
    """A gated training of Nemotron ended in an exception at its first step."""
    assert passes_argument(config_of("llama"), "trunk_keys")
    assert not passes_argument(config_of("nemotron"), "trunk_keys")


def test_the_blocks_of_experts() -> None:
    """A block is the parent of the experts' list and of the router."""
    lm = skeleton(config_of("mixtral"))
    names = [f"model.layers.{layer}.mlp" for layer in range(2)]
    assert expert_blocks(lm) == dict.fromkeys(names, ["experts"])
    assert expert_blocks(skeleton(config_of("llama"))) == {}
