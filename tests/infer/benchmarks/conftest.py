"""Texts of the demo's tokenizer, with infilling and without."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from infer.text import Infilling, Text


@pytest.fixture(scope="session")
def text(data_folder: Path) -> Text:
    """Without infilling."""
    return Text(Tokenizer.from_file(str(data_folder / "tokenizer" / "tokenizer.json")))


@pytest.fixture(scope="session")
def infilling_text(data_folder: Path) -> Text:
    """With it."""
    vocab = json.loads((data_folder / "manifest.json").read_text(encoding="utf-8"))["vocab"]
    ids = Infilling(**{name: vocab[name] for name in ("pre", "suf", "mid", "eot")})
    return Text(
        Tokenizer.from_file(str(data_folder / "tokenizer" / "tokenizer.json")),
        control=[ids.pre, ids.suf, ids.mid, ids.eot],
        infilling=ids,
    )
