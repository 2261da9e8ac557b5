"""Which base models train, with the library's own loss, and which are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from conf import UserError, settings
from conf.stage import write_manifest
from data_prep.ngrams import TABLE
from data_prep.shards import Shards
from data_prep.vocab import Vocab
from tests import warm
from tests.conftest import data_settings, tiny_llama
from tests.train.export.export_fixture import training
from train import __main__ as entry
from train.checks import check_adaptive
from train.config import ModelConfig, ObjectiveConfig, TrainConfig
from train.data import to_tensors, trained_on
from train.export.sidecars import write_tokenizer
from train.model import AdaptiveLM
from train.objective import causal
from train.pretrained import (
    _read_model,
    base_model,
    check_architecture,
    check_tokenizer,
    load_trainable,
    model_config,
)

VOCAB = Vocab(
    size=100, bos=3, eos=4, pre=None, suf=None, mid=None, eot=None, adaptive=(7,)
)
GROWN = replace(
    VOCAB, size=101, adaptive=(100,)
)  # as CodeLlama-34b's, whose rows end before its adaptive id
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
        f"model.shape.{name}={str(value).lower()}" for name, value in shape.items()
    ]
    return settings(
        "train", TrainConfig, ["model=demo", "model.attention=sdpa", *overrides]
    )


def load(config: TrainConfig, vocab: Vocab = VOCAB) -> torch.nn.Module:
    return load_trainable(config.model, vocab=vocab, dtype=torch.float32, seed=0)


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
    check_architecture(architecture, seq_len=48)
    lm = load(config)
    assert lm.config.model_type == kind
    reference = AutoModelForCausalLM.from_config(
        architecture, attn_implementation="eager"
    )
    reference.load_state_dict(lm.state_dict())
    tokens = np.random.default_rng(0).integers(0, 100, (2, 48))
    layout = causal(tokens, np.zeros_like(tokens))
    loss, *_ = AdaptiveLM(lm, chunk=20, L=5)(**to_tensors(layout, torch.device("cpu")))
    ids = torch.from_numpy(tokens)
    expected = reference(
        input_ids=ids, labels=ids
    ).loss  # a mean over the 47 predictions, ours over 48 tokens
    torch.testing.assert_close(loss * 48 / 47, expected)
    loss.backward()
    (expected * 47 / 48).backward()
    ours, theirs = dict(lm.named_parameters()), dict(reference.named_parameters())
    for name in theirs:
        torch.testing.assert_close(
            ours[name].grad, theirs[name].grad, rtol=1e-4, atol=1e-6
        )


GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2}
OTHERS = [
    ("gpt2", GPT, "no rotary positions"),
    (
        "opt",
        {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2},
        "no rotary positions",
    ),
    ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 2}, "no rotary positions"),
    ("t5", {}, "no decoder-only"),
    ("gemma2", SHAPE, "attention is more"),
    ("nanochat", SHAPE, "logits are not"),
    ("cohere", SHAPE, "logits are not"),
    ("granite", SHAPE | {"logits_scaling": 8.0}, "logits are not"),
    ("phi", SHAPE, "logits are not"),  # its head has a bias
    ("mistral", SHAPE | {"sliding_window": 16}, "sliding_window=16 is narrower"),
    (
        "qwen2",
        SHAPE
        | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        "narrower",
    ),
    (
        "lfm2",
        SHAPE | {"layer_types": ["conv", "full_attention"]},
        "layers other than attention: conv",
    ),
]


@pytest.mark.parametrize(("kind", "fields", "reason"), OTHERS)
def test_others_are_refused_by_name(
    kind: str, fields: dict[str, object], reason: str
) -> None:
    with pytest.raises(UserError, match=f"got {kind}, .*{reason}"):
        check_architecture(AutoConfig.for_model(kind, **fields), seq_len=48)


def test_sequences_beyond_the_context_are_refused() -> None:
    with pytest.raises(
        UserError, match="at most 64 tokens, the context of llama, got 65"
    ):
        check_architecture(model_config(tiny("llama").model, vocab=VOCAB), seq_len=65)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "lama"}, "must be an architecture of Transformers, got 'lama'"),
        ({"hiden_size": 3}, "must have fields of LlamaConfig, got hiden_size"),
        ({"hidden_size": 30}, "not a multiple of the number of attention heads"),
        ({"hidden_size": "wide"}, "expected int, got str"),
    ],
)
def test_an_impossible_shape_is_one_sentence(
    fields: dict[str, object], message: str
) -> None:
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
    config = settings(
        "train", TrainConfig, [f"model.path={tmp_path}", "model.attention=sdpa"]
    )
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
    with pytest.raises(
        UserError, match="must have at least 102 embedding rows.*got 100"
    ):
        load(config, replace(GROWN, size=102))


def test_a_grown_tied_model_is_trained_and_exported(tmp_path: Path) -> None:
    """By the commands: two steps, an export, and the library's own loading of it."""
    from data_prep.pipeline import prepare

    prepare(data_settings(tmp_path / "data", "vocab.adaptive=[400]", "vocab.rows=400"))
    vocab = replace(VOCAB, size=400)
    load(
        tiny("qwen2", tie_word_embeddings=True, max_position_embeddings=128), vocab
    ).save_pretrained(tmp_path / "base")
    train = [
        "experiment=demo",
        f"data.path={tmp_path / 'data'}",
        f"model.path={tmp_path / 'base'}",
        f"out={tmp_path / 'tuned'}",
        *(
            "steps=2",
            "global_batch=2",
            "validate_sequences=2",
            "optimizer.warmup_steps=1",
        ),
        "tracker.mode=disabled",
    ]
    export = [
        f"checkpoint={tmp_path / 'tuned'}",
        f"out={tmp_path / 'model'}",
        "dtype=float32",
        train[-1],
    ]
    for module, arguments in (("train", train), ("train.export", export)):
        run = warm.run_ranks(module, *arguments, ranks=1)
        assert run.returncode == 0, run.stdout + run.stderr
    back, result = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not result["missing_keys"] and not result["unexpected_keys"]
    assert back.config.vocab_size == len(back.get_input_embeddings().weight) == 401
    assert back.get_output_embeddings().weight is back.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("adaptive", "message"),
    [
        ((7, 7), "each once"),
        ((3,), "none of a control piece"),
        ((100,), "below 100"),
        ((7,), r"objective.L must be at most the 1 diverse ids, got 5"),
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
    with pytest.raises(
        UserError, match=f"no text may produce an adaptive id, got {common} in the text"
    ):
        check_adaptive(
            str(data_folder), replace(vocab, adaptive=(common,)), ObjectiveConfig()
        )


def test_what_was_exported_can_be_trained_on(tmp_path: Path) -> None:
    """The export marks control ids special, which changed no id of any text, and was taken for another
    tokenizer.
    """
    folder, manifest = training(tmp_path / "tuned")
    vocab, exported = Vocab.from_json(manifest["vocab"]), tmp_path / "model"
    shutil.copytree(folder / "model", tmp_path / "data" / "tokenizer")
    shutil.copytree(folder / "model", exported)
    file = exported / "tokenizer.json"
    value = json.loads(file.read_text())
    value["added_tokens"] = [
        item for item in value["added_tokens"] if item["id"] not in vocab.adaptive
    ]
    file.write_text(json.dumps(value))
    write_tokenizer(exported, vocab, vocab.adaptive)
    check_tokenizer(ModelConfig(path=str(exported)), str(tmp_path / "data"))
    value["model"]["vocab"]["more"] = len(value["model"]["vocab"])
    file.write_text(json.dumps(value))
    with pytest.raises(UserError, match="got shards of another tokenizer"):
        check_tokenizer(ModelConfig(path=str(exported)), str(tmp_path / "data"))


def test_a_training_of_other_base_weights_is_not_finished(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base model without a manifest was known by its path alone: another one in its place was "finished"."""

    def train(config: TrainConfig, built: dict, data: dict) -> None:
        write_manifest(config.out, "checkpoint", built)
        raise KeyboardInterrupt

    monkeypatch.setattr("train.checks.check_start", lambda *args: None)
    monkeypatch.setattr("train.trainer.train", train)
    lm = tiny_llama(vocab=400)
    lm.save_pretrained(tmp_path / "base")
    given = [
        f"data.path={data_folder}",
        f"model.path={tmp_path / 'base'}",
        f"out={tmp_path / 'out'}",
    ]
    config = settings("train", TrainConfig, ["experiment=demo", *given])
    with pytest.raises(KeyboardInterrupt):
        entry.main(config)
    with torch.no_grad():
        lm.lm_head.weight[7] = 0
    lm.save_pretrained(tmp_path / "base")
    with pytest.raises(UserError, match=r"requested inputs\.model\.path"):
        entry.main(config)


def test_a_base_model_with_an_adapter_is_refused(tmp_path: Path) -> None:
    """The library adds an adapter that lies beside config.json: a training of such a model could not be
    exported.
    """
    lm, base = tiny_llama(vocab=400), tmp_path / "base"
    lm.save_pretrained(base)
    get_peft_model(lm, LoraConfig(target_modules=["q_proj"])).save_pretrained(base)
    read, sentence = _read_model(str(base), dtype=torch.float32, attention="eager")
    assert "must be a model without an adapter, got adapter_config.json" in sentence
    (base / "adapter_config.json").unlink()
    assert _read_model(str(base), dtype=torch.float32, attention="eager")[1] == ""


def test_a_damaged_n_gram_table_is_refused(data_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(data_folder, data)
    (data / TABLE).write_bytes((data / TABLE).read_bytes()[:-2])
    given = ["experiment=demo_base", f"data.path={data}", f"out={tmp_path / 'out'}"]
    with pytest.raises(
        UserError,
        match=rf"{TABLE} must be a whole n-gram table, got a checksum mismatch",
    ):
        entry.main(settings("train", TrainConfig, given))


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_folder_of_the_hubs_cache_tells_its_name(tmp_path: Path) -> None:
    folder = (
        tmp_path / "hub" / "models--codellama--CodeLlama-7b-hf" / "snapshots" / COMMIT
    )
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


def test_another_folder_tells_what_its_card_says(tmp_path: Path) -> None:
    """The _name_or_path of a fine-tuned model's config.json is that of its base, and may be a path.

    The folder's own name was taken, and the demo's card had the title "model_directory with adaptive tokens".
    """
    folder = tmp_path / "7b"
    folder.mkdir()
    (folder / "config.json").write_text('{"_name_or_path": "someone/else"}')
    assert base_model(f"{folder}/") == base_model(None) == {}
    for broken in (
        "---\nlicense: [\n---\n",
        "---\n- a\n---\n",
        "---\nlicense: [a]\n---\n",
        "# Model\n",
    ):
        (folder / "README.md").write_text(broken)
        assert base_model(str(folder)) == {}
    (folder / "README.md").write_bytes(b"\xff\xfe")
    assert base_model(str(folder)) == {}
    (folder / "README.md").write_text(
        "---\nmodel_name: Some-7B\nlicense: mit\n---\n# Model\n"
    )
    assert base_model(str(folder)) == {"name": "Some-7B", "license": "mit"}


def test_languages_come_by_their_tokens() -> None:
    languages = {"c": {"tokens": 5}, "go": {"tokens": 7}}
    train = {
        "documents": 2,
        "tokens": 12,
        "modes": {"PLAIN": 2},
        "languages": languages,
        "sequences": 1,
    }
    assert trained_on({"train": train}) == {
        "documents": 2,
        "tokens": 12,
        "modes": {"PLAIN": 2},
        "languages": ["go", "c"],
        "decontaminated": None,
    }
    assert trained_on({"train": train, "decontaminated": ["mbpp"]})[
        "decontaminated"
    ] == ["mbpp"]
