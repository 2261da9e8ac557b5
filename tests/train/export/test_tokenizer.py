"""Test an export's tokenizer with Transformers' AutoTokenizer and this project's encoders."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer
from transformers.cli.serving.utils import parse_assistant_message

from conf.runs.files import read_json, write_json
from data_prep.config import VocabConfig
from data_prep.encode import Encoder
from data_prep.vocab import Vocab, find_vocab, load_tokenizer
from infer.text import Text
from tests.bpe import save, train_bpe
from train.export.sidecars import warn_of_tokenizer, write_tokenizer

CONFIG = VocabConfig(bos="<s>", adaptive=["<adaptive_1>", "<adaptive_2>"])
# The paper's seven diverse tokens; two of them are letters.
DIVERSE = VocabConfig(adaptive=[32011, 32012, 32013, 32014, 32015, 31864, 31857])
PIECES = [*" ▁ox\n", "  ", "ো", "<EOT>", "</s>", "▁<EOT>", " <EOT><EOT>", "def f(x): ."]
TEXTS = [
    "  lead",
    " def f():",
    "    return 1\n\n\n   x",
    "é漢😀\n",
    "\t\n \n",
    " ",
    "x .",
]
Exported = tuple[Path, Vocab, Text, Text]
Codellama = tuple[Path, Vocab, Text, Text, Encoder]


def export(source: Path, folder: Path, config: VocabConfig, used: int) -> Exported:
    """Export a tokenizer for a model that uses the first `used` adaptive ids.

    Return its folder, its vocabulary, and decoding's `Text` before and after the export.
    """
    shutil.copytree(source, folder)
    vocab = find_vocab(load_tokenizer(source), config)
    write_tokenizer(folder, vocab, vocab.adaptive[:used])
    ids = {"control": vocab.control, "rows": vocab.size, "bos": vocab.bos}
    before, after = (Text(load_tokenizer(path), **ids) for path in (source, folder))
    return folder, vocab, before, after


def library(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "demo"
    save(train_bpe(), folder)
    return folder


@pytest.fixture(scope="module")
def codellama(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Codellama:
    source = shared_data / "tokenizers" / "codellama-7b"
    folder = tmp_path_factory.mktemp("tokenizer") / "codellama"
    exported = export(source, folder, DIVERSE, 7)
    return *exported, Encoder(load_tokenizer(folder), exported[1])


@given(parts=st.lists(st.sampled_from(PIECES), max_size=8))
def test_the_encoders_never_produce_an_adaptive_id(
    codellama: Codellama, parts: list[str]
) -> None:
    """A plain tokenizer would match special tokens in raw text."""
    _, vocab, before, after, encoder = codellama
    text = "".join(parts)
    ids = after.encode(text)
    assert ids == before.encode(text) and vocab.control.isdisjoint(ids[1:])
    assert ids[1:] == encoder.encode([encoder.lead(text)])[0].tolist()


def test_transformers_encodes_like_training(codellama: Codellama) -> None:
    """Transformers 5's own class for CodeLlama drops one of several leading spaces."""
    folder, vocab, _, after, _ = codellama
    tokenizer = library(folder)
    assert len(tokenizer) == vocab.size == 32016  # no row is added
    assert set(vocab.control) <= set(tokenizer.all_special_ids)
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == after.encode(text)
        noisy = [id for token in ids for id in (token, *vocab.adaptive)]
        assert tokenizer.decode(noisy, skip_special_tokens=True) == text
        chat = [{"role": "user", "content": text}]
        completion = tokenizer.apply_chat_template(chat, return_dict=True)
        assert completion["input_ids"] == ids  # by the template of the export


def like_deepseek(folder: Path) -> None:
    """Change a tokenizer.json to add no BOS and to mark infilling pieces as not special.

    deepseek-coder's and Qwen's are like this. The class of deepseek-coder adds BOS in
    Transformers 4 but not in 5.
    """
    file = folder / "tokenizer.json"
    content = read_json(file)
    flags = {"add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    content["post_processor"] = {"type": "ByteLevel", **flags}
    for token in content["added_tokens"]:
        token["special"] = token["id"] < 2
    write_json(file, content)
    config = {
        "tokenizer_class": "LlamaTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "normalized": True},
        "add_bos_token": False,
        "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]},
        "clean_up_tokenization_spaces": True,
        "chat_template": "{{ messages[0].content }}!",
    }
    write_json(folder / "tokenizer_config.json", config)


def test_every_text_begins_with_bos_like_documents(demo: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(demo, source)
    like_deepseek(source)
    folder, vocab, _, after = export(source, tmp_path / "model", CONFIG, 1)
    write_json(folder / "config.json", {"model_type": "llama"})
    tokenizer = library(folder)
    ids = tokenizer(" x .").input_ids
    assert ids == after.encode(" x .") and ids[0] == vocab.bos == tokenizer.bos_token_id
    assert tokenizer.eos_token_id == vocab.eos
    skipped = {*vocab.control} - {vocab.adaptive[1]}
    assert tokenizer.decode([*ids, *skipped], skip_special_tokens=True) == " x ."
    assert tokenizer("a", "b").input_ids.count(vocab.bos) == 2
    assert skipped <= set(tokenizer.all_special_ids)
    messages = [{"role": "user", "content": text} for text in ("x", "y\n", "z")]
    chat = tokenizer.apply_chat_template(messages, tokenize=False)
    assert chat == "x!"  # the base model's template


def test_a_tokenizer_that_appends_eos_does_not_after_an_export(tmp_path: Path) -> None:
    """Bug: servers of an export appended EOS to every prompt, which ended the text there."""
    tokenizer = train_bpe()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], special_tokens=[("</s>", 1)]
    )
    save(tokenizer, tmp_path / "source")
    config = VocabConfig(adaptive=["<adaptive_1>"])
    folder, vocab, _, after = export(tmp_path / "source", tmp_path / "to", config, 1)
    write_json(folder / "config.json", {"model_type": "llama"})
    assert vocab.bos is None
    assert library(folder)("def f").input_ids == after.encode("def f")
    assert vocab.eos not in after.encode("def f")


def test_a_chat_answer_is_the_generated_text(demo: Path, tmp_path: Path) -> None:
    """Bug: `transformers serve` put the prompt before each answer of a Qwen without a chat template.

    It parses answers of this architecture by a text that the export's chat template does not write.
    """
    folder, vocab, _, _ = export(demo, tmp_path / "model", CONFIG, 1)
    tokenizer = library(folder)
    message = {"role": "user", "content": "def f(x):"}
    prompt = tokenizer.apply_chat_template([message], return_dict=True).input_ids
    new = tokenizer("    return <x\n", add_special_tokens=False).input_ids
    new = [*new, vocab.adaptive[0], *new, vocab.eos]
    qwen = SimpleNamespace(config=SimpleNamespace(model_type="qwen2"))
    answer = parse_assistant_message(tokenizer, qwen, new, prompt)  # type: ignore[arg-type]
    text = tokenizer.decode(new, skip_special_tokens=True)
    assert answer == (text, None, None) and text == "    return <x\n" * 2


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_tokenizer_that_transformers_rebuilds_is_a_warning(
    demo: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: for Qwen's architectures tokenizer_class has no effect, without a word."""
    folder, vocab, _, _ = export(demo, tmp_path / "model", CONFIG, 1)
    write_json(folder / "config.json", {"model_type": kind})
    warn_of_tokenizer(folder, rows=vocab.size)
    error = capsys.readouterr().err
    if kind == "llama":
        assert not error
    else:
        assert re.search(
            "class Qwen2Tokenizer, .* encodes .* and has .* ids for", error
        )


def test_adaptive_ids_are_special_beside_a_list_of_transformers_5(
    demo: Path, tmp_path: Path
) -> None:
    """Bug: with `extra_special_tokens` of the base, adaptive ids were not among the special ids."""
    base = library(demo)
    base.add_special_tokens({"extra_special_tokens": ["<|tool|>"]})
    base.save_pretrained(tmp_path / "base")
    assert "extra_special_tokens" in read_json(tmp_path / "base/tokenizer_config.json")
    folder, vocab, _, _ = export(tmp_path / "base", tmp_path / "model", CONFIG, 2)
    tokenizer = library(folder)
    tool = tokenizer.convert_tokens_to_ids("<|tool|>")
    assert {*vocab.control, tool} <= {*tokenizer.all_special_ids}
