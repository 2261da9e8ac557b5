"""Test that base models train with Transformers' own loss, and which models are refused."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conf.errors import UserError
from conf.runs.files import read_json, write_json
from conf.settings.compose import settings
from data_prep.pipeline import prepare
from data_prep.shards import Shards
from data_prep.vocab import Vocab
from tests.bpe import save, train_bpe
from tests.conftest import text_vocab, vocab_of
from tests.data_prep.chat_fixture import chat_settings, say
from train.config import ObjectiveConfig, TrainConfig
from train.data import lay_out, to_tensors
from train.model import AdaptiveLM
from train.objective import causal
from train.pretrained import (
    base_model,
    check_architecture,
    load_trainable,
    model_config,
)

VOCAB = text_vocab(100, 7)
NO_COMPILER = "InvalidCxxCompiler: No working C++ compiler found"
# Like CodeLlama-34b's: the adaptive id is one above the last embedding row.
GROWN = replace(VOCAB, size=101, adaptive=(100,))
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
    overrides = [
        f"++model.shape.{name}={str(value).lower()}" for name, value in shape.items()
    ]
    return settings(
        "train", TrainConfig, ["model=tiny", "model.attention=sdpa", *overrides]
    )


def load(config: TrainConfig, vocab: Vocab = VOCAB) -> torch.nn.Module:
    architecture = model_config(config.model, vocab=vocab)
    return load_trainable(
        config.model, architecture, vocab=vocab, dtype=torch.float32, seed=0
    )


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 16}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("starcoder2", {}),
        ("granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
        ("cohere2", {"logit_scale": 0.3, "sliding_window": 16}),
        ("phi", {}),
    ],
)
def test_the_loss_equals_transformers(kind: str, fields: dict[str, object]) -> None:
    config = tiny(kind, **fields)
    architecture = model_config(config.model, vocab=VOCAB)
    check_architecture(architecture, seq_len=48)
    lm = load(config)
    reference = AutoModelForCausalLM.from_config(architecture)
    reference.load_state_dict(lm.state_dict())
    tokens = np.random.default_rng(0).integers(0, 100, (2, 48))
    layout = causal(tokens, np.zeros_like(tokens))
    loss, *_ = AdaptiveLM(lm, chunk=20, L=5)(**to_tensors(layout, torch.device("cpu")))
    ids = torch.from_numpy(tokens)
    # Transformers takes the mean over the 47 predictions, this project over the 48 tokens.
    expected = reference(input_ids=ids, labels=ids).loss * 47 / 48
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    gradients, references = (
        [p.grad for p in model.parameters() if p.grad is not None]
        for model in (lm, reference)
    )
    torch.testing.assert_close(gradients, references, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("objective", ["causal", "branch"])
def test_the_loss_of_chat_data_equals_transformers_loss_of_the_answer(
    tmp_path: Path, objective: str
) -> None:
    rows = [{"messages": say("What is it?", "A test of one answer.")}]
    prepare(chat_settings(tmp_path, rows))
    vocab = vocab_of(tmp_path / "out")
    (sequence,) = Shards(tmp_path / "out", "train")
    config = tiny("llama", max_position_embeddings=256)
    lm = load(config, vocab)
    reference = AutoModelForCausalLM.from_config(
        model_config(config.model, vocab=vocab)
    )
    reference.load_state_dict(lm.state_dict())
    layout = lay_out(
        [sequence], [0], vocab, ObjectiveConfig(objective, start_rate=0.3), seed=(0,)
    )
    module = AdaptiveLM(lm, chunk=20, L=5)
    batch = to_tensors(layout, torch.device("cpu"))
    batch["weights"][:, layout.trunk :] = 0  # the drafts' term
    loss, *_ = module(**batch)
    ids = torch.from_numpy(sequence.tokens.astype(np.int64))[None]
    labels = torch.full_like(ids, -100)
    prompt = int(sequence.spans["prompt"][0])
    labels[:, prompt : sequence.used] = ids[:, prompt : sequence.used]
    # Transformers takes the mean over the answer, this project over all tokens of the sequence.
    share = (sequence.used - prompt) / ids.numel()
    half = 0.5 if objective == "branch" else 1.0
    expected = reference(input_ids=ids, labels=labels).loss * share * half
    torch.testing.assert_close(loss, expected)
    drafts = layout.positions[layout.offsets > 0]
    assert len(drafts) > 2 or objective == "causal"
    assert ((drafts >= prompt) & (drafts < sequence.used)).all()
    before = loss.item()
    loss.backward()
    torch.optim.SGD(lm.parameters(), lr=0.1).step()
    assert module(**batch)[0].item() < before


UNSUPPORTED = [
    ("t5", {}, "not a decoder-only"),
    ("gemma2", SHAPE, "attention with softcap"),
    ("bert-generation", {}, "attention that is not causal"),
    ("gpt_neox_japanese", {}, "does not call one of Transformers' attention"),
    ("nanochat", SHAPE, "logits that are not"),
    ("lfm2", SHAPE | {"layer_types": ["conv"] * 2}, "layers other than attention"),
    # Bug: these were accepted and ended in an exception of the first forward.
    ("llama", SHAPE | {"num_key_value_heads": 3}, "4 heads, not a multiple of its 3"),
    ("mistral", SHAPE | {"sliding_window": 0}, "layers with a window of 0 tokens"),
]


@pytest.mark.parametrize(("kind", "fields", "reason"), UNSUPPORTED)
def test_unsupported_types_are_refused_with_a_reason(
    kind: str, fields: dict[str, object], reason: str
) -> None:
    with pytest.raises(UserError, match=f"got {kind}, .*{reason}"):
        check_architecture(AutoConfig.for_model(kind, **fields), seq_len=48)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_missing_adaptive_row_is_added(kind: str, tmp_path: Path) -> None:
    tied = kind == "qwen2"
    old = load(tiny(kind, tie_word_embeddings=tied))
    old.save_pretrained(tmp_path)
    config = settings(
        "train", TrainConfig, [f"model.path={tmp_path}", "model.attention=sdpa"]
    )
    lm = load(config, GROWN)
    weights = lm.state_dict()
    for name, before in old.state_dict().items():
        assert torch.equal(weights[name][: len(before)], before)
    head = lm.get_output_embeddings().weight
    row = lm.get_input_embeddings().weight[100]
    assert len(head) == lm.config.vocab_size == 101
    if not tied:
        torch.testing.assert_close(head[100], head[:100].mean(0))
    # For any hidden state, another id has a larger logit.
    hidden = torch.randn(1000, head.shape[1])
    assert (hidden @ head.T).argmax(1).max() < 100
    again = load(config, GROWN)
    assert torch.equal(again.get_input_embeddings().weight[100], row)
    assert (head is lm.get_input_embeddings().weight) == tied
    with pytest.raises(UserError, match="at least 102 embedding rows.*got 100"):
        load(config, replace(GROWN, size=102))


def test_a_new_row_of_a_head_with_biases_is_never_the_likeliest(tmp_path: Path) -> None:
    """Bug: its bias was 0, the largest bias of a head with negative biases."""
    old = load(tiny("phi"))
    with torch.no_grad():
        old.lm_head.bias[:] = torch.linspace(-4, -2, 100)
    old.save_pretrained(tmp_path)
    config = settings(
        "train", TrainConfig, [f"model.path={tmp_path}", "model.attention=sdpa"]
    )
    head = load(config, GROWN).get_output_embeddings()
    torch.testing.assert_close(head.bias[100], head.bias[:100].mean())
    hidden = torch.randn(1000, head.weight.shape[1])
    assert head(hidden).argmax(1).max() < 100


def test_a_spare_row_starts_near_trained_rows(tmp_path: Path) -> None:
    """Bug: spare rows kept their untrained values, or became the mean of all rows.

    Both point in a direction of their own. With either, the masked loss on
    Qwen2.5-Coder-0.5B began at 21 nats (ln V is 11.9).
    """
    pieces = train_bpe().get_vocab_size()
    vocab = text_vocab(pieces + 8, pieces + 1)
    lm = load(tiny("qwen2"), vocab)
    before = lm.get_input_embeddings().weight.data
    before[:pieces] += 0.02  # a direction that all rows share
    before[pieces:] = before[:pieces].mean(0)
    lm.save_pretrained(tmp_path)
    save(train_bpe(), tmp_path)
    config = settings(
        "train", TrainConfig, [f"model.path={tmp_path}", "model.attention=sdpa"]
    )
    rows = load(config, vocab).get_input_embeddings().weight.data
    lengths = rows[:pieces].norm(dim=1)
    row = rows[pieces + 1]
    assert before[pieces].norm() < 0.8 * lengths.min()
    assert 0.7 * lengths.median() < row.norm() < lengths.max()
    unchanged = torch.arange(len(rows)) != pieces + 1
    assert torch.equal(rows[unchanged], before[unchanged])
    # adaptive.json lists a row that training has used, which must keep its values.
    write_json(tmp_path / "adaptive.json", {"adaptive_ids": [pieces + 1], "L": 5})
    assert torch.equal(load(config, vocab).get_input_embeddings().weight, before)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_folder_in_the_hubs_cache_gives_name_and_commit(tmp_path: Path) -> None:
    folder = tmp_path / "models--codellama--CodeLlama-7b-hf" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(
        "---\nlicense: llama2\nlicense_link: LICENSE\ntags: [code]\n---\n# Model\n"
    )
    assert base_model(str(folder)) == {
        "name": "CodeLlama-7b-hf",
        "hub": "codellama/CodeLlama-7b-hf",
        "commit": COMMIT,
        "license": "llama2",
        "license_link": "LICENSE",
    }


def test_a_head_of_its_own_stays_untied_whatever_config_json_says(
    tmp_path: Path,
) -> None:
    """Bug: with tie_word_embeddings=true new rows tied the head, and the export was refused."""
    base: Any = load(tiny("llama"))
    head = base.lm_head.weight.detach().clone()
    base.save_pretrained(tmp_path)
    config = read_json(tmp_path / "config.json") | {"tie_word_embeddings": True}
    write_json(tmp_path / "config.json", config)
    lm: Any = load(settings("train", TrainConfig, [f"model.path={tmp_path}"]), GROWN)
    assert not lm.config.tie_word_embeddings
    assert torch.equal(lm.lm_head.weight[:100], head)


def test_a_model_that_keeps_its_adapter_is_refused(tmp_path: Path) -> None:
    """Bug: a training from an export with lora=kept began with the weights of its base."""
    lm: Any = load(tiny("llama"))
    lm.save_pretrained(tmp_path)
    write_json(tmp_path / "adapter" / "adapter_config.json", {"peft_type": "LORA"})
    config = settings("train", TrainConfig, [f"model.path={tmp_path}"])
    with pytest.raises(
        UserError, match="in its folder adapter/. Export .* lora=merged"
    ):
        load(config)
    write_json(tmp_path / "adaptive.json", {"adaptive_ids": [7], "gated": True})
    load(config)


@pytest.mark.parametrize("setting", ["null", "true", "false"])
def test_layers_are_compiled_only_where_a_compiler_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    """Bug: without a C++ compiler model.compile=true ended in a traceback at the first step."""

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{NO_COMPILER}\n\nSet TORCHDYNAMO_VERBOSE=1")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "compile", fails)
    config = tiny("llama")
    config.model.compile = {"null": None, "true": True, "false": False}[setting]
    if setting == "true":
        with pytest.raises(UserError, match=rf"got true: {re.escape(NO_COMPILER)}\. "):
            load(config)
        return
    layers = load(config).model.layers  # type: ignore[union-attr]
    assert all(layer._compiled_call_impl is None for layer in layers)  # type: ignore[union-attr]
    told = f"train: the layers are not compiled: {NO_COMPILER}\n"
    assert capsys.readouterr().out == (told if setting == "null" else "")


def test_a_gpu_compiles_on_demand_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    config = tiny("llama")
    config.model.compile = None
    for on_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", partial(bool, on_gpu))
        monkeypatch.setattr(torch, "ones", lambda size, **options: torch.zeros(size))
        layers = load(config).model.layers  # type: ignore[union-attr]
        compiled = [layer._compiled_call_impl is not None for layer in layers]  # type: ignore[union-attr]
        assert compiled == [not on_gpu] * 2
