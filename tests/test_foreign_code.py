"""Test that code in a model directory never runs, without a question, and is refused in one sentence."""

import ast
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.errors import UserError
from conf.runs.stage import ROOT
from data_prep.chat import ChatTemplate
from data_prep.encode import Encoder
from data_prep.vocab import load_tokenizer
from infer.bench.prompts import ids_of
from infer.chat import chat_ids, has_template, user_header
from infer.models.checkpoint import ModelDirectory
from tests import bpe
from tests.conftest import text_vocab

PACKAGES = ("conf", "data_prep", "train", "infer")
LOADERS = ("from_pretrained", "from_config")
#: These run no code of a folder and have no such argument. datasets runs no scripts from 5.2 on.
WITHOUT_CODE = ("PeftModel", "LoraConfig")
CODE = """
open({ran!r}, "w")
from transformers import PreTrainedTokenizerFast
class Own(PreTrainedTokenizerFast): pass
"""
MESSAGES = [{"role": "user", "content": "hello"}]


def unsafe_calls(source: str) -> Iterator[int]:
    """Yield the lines of calls that load a folder without trust_remote_code=False."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if (
            node.func.attr not in LOADERS
            or ast.unparse(node.func.value) in WITHOUT_CODE
        ):
            continue
        keywords = {item.arg: ast.unparse(item.value) for item in node.keywords}
        if keywords.get("trust_remote_code") != "False":
            yield node.lineno


def test_every_load_passes_trust_remote_code_false() -> None:
    """Without the argument Transformers asks, and takes a "y" from standard input."""
    assert list(unsafe_calls("a = AutoTokenizer.from_pretrained(x, **options)")) == [1]
    unsafe = [
        f"{path.relative_to(ROOT)}:{line}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line in unsafe_calls(path.read_text(encoding="utf-8"))
    ]
    assert not unsafe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a tokenizer with Python code that would write the file RAN; return its folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(bpe.FOLDER / "tokenizer.json", folder)
    (folder / "own.py").write_text(CODE.format(ran=str(folder / "RAN")))
    settings = {
        "tokenizer_class": "Own",
        "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text('{"vocab_size": 512}')
    return folder


def prepare_chat(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ChatTemplate(folder, Encoder(tokenizer, text_vocab(512, 6)))


def read_messages(folder: Path) -> None:
    text = ModelDirectory(folder).text
    ids_of({"messages": MESSAGES}, text, folder, max_tokens=8)


USES = {
    "infer chat=true": lambda folder: chat_ids(folder, MESSAGES),
    "infer.bench with messages": read_messages,
    "infer.bench with chat": has_template,
    "infer.regenerate own_prompts": user_header,
    "data_prep data=chat": prepare_chat,
}


@pytest.mark.parametrize("use", USES)
def test_code_of_a_directory_does_not_run(
    folder: Path, use: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: it ran after a "y" on standard input, where `infer` reads its prompt."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("builtins.input", lambda question: "y")
    with pytest.raises(UserError, match="got custom Python code .*is never run"):
        USES[use](folder)
    assert not (folder / "RAN").exists()
