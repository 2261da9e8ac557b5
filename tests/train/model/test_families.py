"""Rotary causal models train with the library's own loss; others, and data that does not fit, are refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conf import UserError, settings
from data_prep.shards import Shards
from data_prep.vocab import Vocab
from tests import warm
from tests.conftest import data_settings
from train.checks import check_adaptive
from train.config import ObjectiveConfig, TrainConfig
from train.data import to_tensors
from train.model.families import check_family
from train.model.lm import AdaptiveLM
from train.model.pretrained import load_model, model_config
from train.objective.layout import causal

VOCAB = Vocab(size=100, bos=3, eos=4, pre=None, suf=None, mid=None, eot=None, adaptive=(7,))
GROWN = replace(VOCAB, size=101, adaptive=(100,))  # as CodeLlama-34b's, whose rows end before its adaptive id
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tiny(kind: str, **fields: object) -> TrainConfig:
    shape = SHAPE | {"model_type": kind} | fields
    overrides = [f"model.shape.{name}={str(value).lower()}" for name, value in shape.items()]
    return settings("train", TrainConfig, ["model=demo", "model.attention=sdpa", *overrides])


def load(config: TrainConfig, vocab: Vocab = VOCAB) -> torch.nn.Module:
    return load_model(config.model, vocab=vocab, dtype=torch.float32, seed=0)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 64}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("starcoder2", {}),
    ],
)
def test_our_loss_is_the_librarys(kind: str, fields: dict[str, object]) -> None:
    config = tiny(kind, **fields)
    architecture = model_config(config.model, vocab=VOCAB)
    check_family(architecture, seq_len=48)
    lm = load(config)
    assert lm.config.model_type == kind
    reference = AutoModelForCausalLM.from_config(architecture, attn_implementation="eager")
    reference.load_state_dict(lm.state_dict())
    tokens = np.random.default_rng(0).integers(0, 100, (2, 48))
    layout = causal(tokens, np.zeros_like(tokens))
    loss, *_ = AdaptiveLM(lm, chunk=20, L=5)(**to_tensors(layout, torch.device("cpu")))
    ids = torch.from_numpy(tokens)
    wanted = reference(input_ids=ids, labels=ids).loss  # a mean over the 47 predictions, ours over 48 tokens
    torch.testing.assert_close(loss * 48 / 47, wanted)
    loss.backward()
    (wanted * 47 / 48).backward()
    ours, theirs = dict(lm.named_parameters()), dict(reference.named_parameters())
    for name in theirs:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=1e-4, atol=1e-6)


GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2}
OTHERS = [
    ("gpt2", GPT, "no rotary positions"),
    ("opt", {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2}, "no rotary positions"),
    ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 2}, "no rotary positions"),
    ("t5", {}, "no decoder-only"),
    ("gemma2", SHAPE, "attention is more"),
    ("nanochat", SHAPE, "logits are not"),
    ("cohere", SHAPE, "logits are not"),
    ("granite", SHAPE | {"logits_scaling": 8.0}, "logits are not"),
    ("phi", SHAPE, "logits are not"),  # its head has a bias
    ("mistral", SHAPE | {"sliding_window": 16}, "sliding_window=16 is narrower"),
    ("qwen2", SHAPE | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "narrower"),
    ("lfm2", SHAPE | {"layer_types": ["conv", "full_attention"]}, "layers other than attention: conv"),
]


@pytest.mark.parametrize(("kind", "fields", "reason"), OTHERS)
def test_others_are_refused_by_name(kind: str, fields: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError, match=f"found {kind}, .*{reason}"):
        check_family(AutoConfig.for_model(kind, **fields), seq_len=48)


def test_sequences_beyond_the_context_are_refused() -> None:
    with pytest.raises(UserError, match="at most 64 tokens, the context of llama, found 65"):
        check_family(model_config(tiny("llama").model, vocab=VOCAB), seq_len=65)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "lama"}, "wanted an architecture of Transformers, found 'lama'"),
        ({"hiden_size": 3}, "wanted fields of LlamaConfig, found hiden_size"),
        ({"hidden_size": 30}, "not a multiple of the number of attention heads"),
        ({"hidden_size": "wide"}, "expected int, got str"),
    ],
)
def test_an_impossible_shape_is_one_sentence(fields: dict[str, object], message: str) -> None:
    """The library took unknown fields in silence, and its own errors were tracebacks."""
    config = settings("train", TrainConfig, ["model=demo"])
    config.model.shape |= fields
    with pytest.raises(UserError, match=message) as caught:
        model_config(config.model, vocab=VOCAB)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_missing_adaptive_row_is_added(kind: str, tmp_path: Path) -> None:
    tied = kind == "qwen2"
    old = load(tiny(kind, tie_word_embeddings=tied))
    old.save_pretrained(tmp_path)
    config = settings("train", TrainConfig, [f"model.path={tmp_path}", "model.attention=sdpa"])
    first, second = load(config, GROWN), load(config, GROWN)
    assert first.config.vocab_size == 101
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])
        before = old.state_dict()[name]
        assert torch.equal(weight[: len(before)], before)
    head = first.get_output_embeddings().weight
    assert len(head) == 101
    torch.testing.assert_close(head[100], head[:100].mean(0))
    assert (head is first.get_input_embeddings().weight) == tied
    with pytest.raises(UserError, match="wanted at least 102 embedding rows.*found 100"):
        load(config, replace(GROWN, size=102))


def test_a_grown_tied_model_is_trained_and_exported(tmp_path: Path) -> None:
    """By the commands: two steps, an export, and the library's own loading of it."""
    from data_prep.pipeline import prepare

    prepare(data_settings(tmp_path / "data", "vocab.adaptive=[400]", "vocab.rows=400"))
    vocab = replace(VOCAB, size=400)
    load(tiny("qwen2", tie_word_embeddings=True, max_position_embeddings=128), vocab).save_pretrained(
        tmp_path / "base"
    )
    train = [
        "experiment=demo",
        f"data.path={tmp_path / 'data'}",
        f"model.path={tmp_path / 'base'}",
        f"out={tmp_path / 'tuned'}",
        *("steps=2", "global_batch=2", "validate_sequences=2", "optimizer.warmup_steps=1"),
        "tracker.mode=disabled",
    ]
    export = [f"checkpoint={tmp_path / 'tuned'}", f"out={tmp_path / 'model'}", "dtype=float32", train[-1]]
    for module, arguments in (("train", train), ("train.export", export)):
        run = warm.run_ranks(module, *arguments, ranks=1)
        assert run.returncode == 0, run.stdout + run.stderr
    back, found = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert back.config.vocab_size == len(back.get_input_embeddings().weight) == 401
    assert back.get_output_embeddings().weight is back.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("adaptive", "message"),
    [
        ((7, 7), "each once"),
        ((3,), "none of a control piece"),
        ((100,), "below 100"),
        ((7,), r"objective.L=5: wanted at most the 1 diverse ids"),
    ],
)
def test_adaptive_ids_that_cannot_be(adaptive: tuple[int, ...], message: str) -> None:
    objective = ObjectiveConfig(diverse=len(set(adaptive)) == 1 and adaptive[0] == 7)
    with pytest.raises(UserError, match=message):
        check_adaptive("shards", replace(VOCAB, adaptive=adaptive), objective)


def test_adaptive_ids_that_text_produces(data_folder: Path) -> None:
    from conf.stage import read_manifest

    vocab = Vocab.from_json(read_manifest(data_folder, "shards", "data.path")["vocab"])
    check_adaptive(str(data_folder), vocab, ObjectiveConfig())
    common = int(Shards(data_folder, "train")[0].tokens[5])
    assert common not in vocab.control
    with pytest.raises(UserError, match=f"adaptive ids that no text produces, found {common} in the text"):
        check_adaptive(str(data_folder), replace(vocab, adaptive=(common,)), ObjectiveConfig())
