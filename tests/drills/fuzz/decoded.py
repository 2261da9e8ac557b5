"""What a data folder holds, read back to texts: the other direction of all that data_prep does."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.encode import Encoder, Mode
from data_prep.shards import SPLITS, Shards
from data_prep.vocab import Vocab, load_tokenizer
from tests.data_prep.conftest import text_of


@dataclass
class Open:
    """A document whose parts are being collected."""

    id: str
    language: int
    mode: Mode
    ids: list[int] = field(default_factory=list)


def documents(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(id, language, text) of every document, or piece of one, of all splits."""
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    vocab = Vocab.from_json(manifest["vocab"])
    encoder = Encoder(load_tokenizer(folder / "tokenizer"), vocab)
    for split in SPLITS:
        assert bool(manifest[split]["shards"]) == any(folder.glob(f"{split}-*.tokens.npy"))
        if manifest[split]["shards"]:
            for one in _collected(Shards(folder, split)):
                text = text_of(one.ids, one.mode, vocab, encoder)
                yield one.id, manifest["languages"][one.language], text


def _collected(shards: Shards) -> Iterator[Open]:
    """Documents with all of their ids: of plain ones, which may be cut, one at a time is open."""
    plain: Open | None = None
    for sequence in shards:
        for id, span in zip(sequence.ids, sequence.spans, strict=True):
            ids = sequence.tokens[span["start"] : span["stop"]].tolist()
            mode = Mode(span["mode"])
            if span["offset"]:
                assert plain and plain.id == id and len(plain.ids) == span["offset"], f"{id}: a part is missing"
                plain.ids += ids
                continue
            begun = Open(id, int(span["language"]), mode, ids)
            if mode is Mode.PLAIN:
                if plain:
                    yield plain
                plain = begun
            else:
                yield begun
    if plain:
        yield plain


def dropped(folder: Path) -> list[dict[str, Any]]:
    """The rows that were set aside."""
    lines = (folder / "drops.jsonl").read_bytes().split(b"\n")
    return [json.loads(line) for line in lines if line]


def held_out(folder: Path) -> list[tuple[str, str, str]]:
    """(id, language, text) of the held-out documents as they are given to whoever measures."""
    lines = (folder / "held_out.jsonl").read_bytes().split(b"\n")
    rows = [json.loads(line) for line in lines if line]
    return [(row["id"], row["language"], row["content"]) for row in rows]


def ids_are_in_range(folder: Path) -> bool:
    """Whether every token is one of the vocabulary."""
    size = json.loads((folder / "manifest.json").read_text("utf-8"))["vocab"]["size"]
    return all(int(np.load(path).max(initial=0)) < size for path in folder.glob("*.tokens.npy"))
