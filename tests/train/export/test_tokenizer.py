"""The tokenizer of an export, by Transformers' AutoTokenizer and by our encoders."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from conf import UserError
from data_prep.config import VocabConfig
from data_prep.encode import Encoder
from data_prep.vocab import Vocab, find_vocab, load_tokenizer, save_tokenizer, train_bpe
from infer.text import Infilling, Text
from train.export.sidecars import mark_special, write_chat_template, write_tokenizer

CONFIG = VocabConfig(train_size=320, adaptive=["<adaptive_1>", "<adaptive_2>"])
PIECES = [
    *" ▁ox\n",
    "  ",
    "ো",
    "<EOT>",
    "</s>",
    "▁<EOT>",
    "▁<EOT><EOT>",
    " <EOT><EOT>",
    "def f(x): .",
]
Codellama = tuple[Path, Vocab, Text, Text, Encoder]
DIVERSE = [32011, 32012, 32013, 32014, 32015, 31864, 31857]


def exported(
    source: Path, folder: Path, config: VocabConfig, used: int
) -> tuple[Vocab, Text, Text]:
    """Export a tokenizer for a model with the first adaptive ids; return decoding's Text before and after."""
    shutil.copytree(source, folder)
    vocab = find_vocab(load_tokenizer(source), config)
    write_tokenizer(folder, vocab, vocab.adaptive[:used])
    infilling = (
        Infilling(vocab.pre, vocab.suf, vocab.mid, vocab.eot)
        if vocab.infilling
        else None
    )
    before, after = (
        Text(
            load_tokenizer(at),
            control=vocab.control,
            rows=vocab.size,
            bos=vocab.bos,
            infilling=infilling,
        )
        for at in (source, folder)
    )
    return vocab, before, after


def library(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "demo"
    save_tokenizer(
        train_bpe(["def f(x):\n    return x\n"] * 50, CONFIG), CONFIG, None, folder
    )
    return folder


@pytest.fixture(scope="module")
def codellama(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Codellama:
    """With the paper's seven diverse tokens, two of which are letters."""
    source = shared_data / "tokenizers" / "codellama-7b"
    folder = tmp_path_factory.mktemp("tokenizer") / "codellama"
    config = VocabConfig(adaptive=DIVERSE)
    vocab, before, after = exported(source, folder, config, 7)
    return folder, vocab, before, after, Encoder(load_tokenizer(folder), vocab)


def test_text_skips_adaptive_ids(codellama: Codellama) -> None:
    folder, vocab, _, after, _ = codellama
    tokenizer = library(folder)
    ids = tokenizer("def f(x):").input_ids
    noisy = [id for token in ids for id in (token, *vocab.adaptive)]
    assert (
        tokenizer.decode(noisy, skip_special_tokens=True)
        == "def f(x):"
        == after.decode(noisy)
    )
    assert set(vocab.control) <= set(tokenizer.all_special_ids)
    assert len(tokenizer) == vocab.size == 32016  # no row is added


@given(parts=st.lists(st.sampled_from(PIECES), max_size=8))
def test_no_text_becomes_an_adaptive_id_by_our_encoders(
    codellama: Codellama, parts: list[str]
) -> None:
    """Special tokens are matched in raw text by a plain encoder."""
    _, vocab, before, after, encoder = codellama
    text = "".join(parts)
    ids = after.encode(text)
    assert ids == before.encode(text) and vocab.control.isdisjoint(ids[1:])
    assert ids[1:] == encoder.encode([encoder.lead(text)])[0].tolist()


@pytest.mark.parametrize(
    "text",
    ["  lead", " def f():", "    return 1\n\n\n   x", "é漢😀\n", "\t\n \n", " ", "x ."],
)
def test_transformers_encodes_as_training_did(codellama: Codellama, text: str) -> None:
    """Transformers 5's class for CodeLlama dropped a space: "  lead" came back as " lead"."""
    folder, _, _, after, _ = codellama
    tokenizer = library(folder)
    ids = tokenizer(text).input_ids
    assert (
        ids == after.encode(text)
        and tokenizer.decode(ids, skip_special_tokens=True) == text
    )


@pytest.mark.parametrize(
    ("name", "config", "ids", "text"),
    [
        # With identical tokens the letter among the diverse ones is text
        ("codellama-7b", VocabConfig(adaptive=DIVERSE), [32011, 31864], "ো"),
        # A row without a piece, and one that training adds
        ("codellama-7b", VocabConfig(rows=32100, adaptive=[32050]), [921, 32050], "x"),
        (
            "codellama-34b-hf",
            VocabConfig(rows=32000, adaptive=[32000]),
            [921, 32000],
            "x",
        ),
    ],
)
def test_decoding_skips_only_the_adaptive_ids_of_the_model(
    shared_data: Path,
    tmp_path: Path,
    name: str,
    config: VocabConfig,
    ids: list[int],
    text: str,
) -> None:
    vocab, _, after = exported(
        shared_data / "tokenizers" / name, tmp_path / "model", config, 1
    )
    tokenizer = library(tmp_path / "model")
    assert (
        tokenizer.decode([vocab.bos, *ids], skip_special_tokens=True)
        == text
        == after.decode(ids)
    )
    assert (vocab.adaptive[0] in tokenizer.all_special_ids) == (config.rows != 32100)
    assert len(tokenizer) == (
        32016 if name == "codellama-7b" else 32005
    )  # no piece is added


@pytest.mark.parametrize(
    "described", [True, False], ids=["described", "tokenizer.json alone"]
)
def test_every_text_begins_with_bos_as_documents_did(
    demo: Path, tmp_path: Path, described: bool
) -> None:
    """deepseek-coder's tokenizer.json adds no BOS; its class did in Transformers 4, not in 5."""
    source = tmp_path / "source"
    shutil.copytree(demo, source)
    value = json.loads((source / "tokenizer.json").read_text())
    flags = {"add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    value["post_processor"] = {"type": "ByteLevel", **flags}
    decoder = {}
    for token in value[
        "added_tokens"
    ]:  # Qwen's pieces of infilling are added, and not special
        token["special"] = token["id"] < 2
        decoder[token["id"]] = {
            name: flag for name, flag in token.items() if name != "id"
        }
    (source / "tokenizer.json").write_text(json.dumps(value))
    config = {
        "added_tokens_decoder": decoder,
        "tokenizer_class": "LlamaTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "normalized": True},
        "add_bos_token": False,
        "additional_special_tokens": [
            {"__type": "AddedToken", "content": "<adaptive_2>"}
        ],
        "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]},
        "clean_up_tokenization_spaces": True,
    }
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    if not described:
        (source / "tokenizer_config.json").unlink()
    vocab, _, after = exported(source, tmp_path / "model", CONFIG, 1)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = library(tmp_path / "model")
    ids = tokenizer(" x .").input_ids
    assert ids == after.encode(" x .") and ids[0] == vocab.bos == tokenizer.bos_token_id
    assert tokenizer.eos_token_id == vocab.eos
    skipped = {*vocab.control} - {vocab.adaptive[1]}
    assert tokenizer.decode([*ids, *skipped], skip_special_tokens=True) == " x ."
    assert tokenizer("a", "b").input_ids.count(vocab.bos) == 2
    assert skipped <= set(tokenizer.all_special_ids)


def test_the_chat_template_is_exported(demo: Path, tmp_path: Path) -> None:
    """Transformers keeps it in its own file, which data preparation did not copy."""
    source = tmp_path / "source"
    shutil.copytree(demo, source)
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    save_tokenizer(load_tokenizer(source), CONFIG, str(source), tmp_path / "data")
    exported(tmp_path / "data", tmp_path / "model", CONFIG, 1)
    tokenizer: Any = library(tmp_path / "model")
    assert (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "x"}], tokenize=False
        )
        == "x!"
    )


def test_a_completion_model_gets_a_template(demo: Path, tmp_path: Path) -> None:
    """Chats with a model without a template were an internal server error."""
    exported(demo, tmp_path / "model", CONFIG, 1)
    write_chat_template(tmp_path / "model", None)
    tokenizer: Any = library(tmp_path / "model")
    user, answer = (
        {"role": "user", "content": " def f(x):\n"},
        {"role": "assistant", "content": "    return x"},
    )
    chat = tokenizer.apply_chat_template(
        [user], add_generation_prompt=True, return_dict=True
    )
    assert chat["input_ids"] == tokenizer(" def f(x):\n").input_ids
    text = tokenizer.apply_chat_template([user, answer, user], tokenize=False)
    assert text == "<s> def f(x):\n    return x\n def f(x):\n"


def test_one_message_is_its_completion_with_codellamas_tokenizer(
    shared_data: Path, tmp_path: Path
) -> None:
    exported(
        shared_data / "tokenizers" / "codellama-7b",
        tmp_path / "model",
        VocabConfig(adaptive=DIVERSE),
        1,
    )
    write_chat_template(tmp_path / "model", None)
    tokenizer: Any = library(tmp_path / "model")
    for text in ("def f(x):\n", "  x = 1", "<s>x"):
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], return_dict=True
        )
        assert chat["input_ids"] == tokenizer(text).input_ids


def test_a_template_is_the_files_then_the_tokenizers(
    demo: Path, tmp_path: Path
) -> None:
    folder, template = tmp_path / "model", tmp_path / "chat.jinja"
    exported(demo, folder, CONFIG, 1)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": "{{ messages[0].content }}!"})
    )

    def rendered() -> str:
        tokenizer: Any = library(folder)
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": "x"}], tokenize=False
        )

    write_chat_template(folder, None)
    assert rendered() == "x!"
    template.write_text("{{ messages[0].content }}?")
    write_chat_template(folder, str(template))
    assert rendered() == "x?"
    for text in ("{% for", "{{ messages[0].content.absent() }}", "always the same"):
        template.write_text(text)
        with pytest.raises(
            UserError, match=r"chat_template=.*chat\.jinja must be a Jinja template"
        ):
            write_chat_template(folder, str(template))


def test_special_tokens_keep_their_flags() -> None:
    added = [{"id": 5, "content": "b", "special": False, "lstrip": True}]
    flags = {
        "single_word": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    assert mark_special(added, {3: "a", 5: "b"}) == [
        {"id": 3, "content": "a", "lstrip": False, **flags},
        {"id": 5, "content": "b", "lstrip": True, **flags},
    ]


def test_an_export_of_an_export_changes_nothing(demo: Path, tmp_path: Path) -> None:
    vocab, _, _ = exported(demo, tmp_path / "model", CONFIG, 1)
    names = ("tokenizer.json", "tokenizer_config.json")
    before = [(tmp_path / "model" / name).read_bytes() for name in names]
    write_tokenizer(tmp_path / "model", vocab, vocab.adaptive[:1])
    assert [(tmp_path / "model" / name).read_bytes() for name in names] == before
    assert (
        Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).get_vocab_size()
        == vocab.size
    )
