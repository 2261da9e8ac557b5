"""A small real input in several parts, its preparation by one worker, and decoded shards."""

import json
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from conf.runs.files import read_json
from conf.runs.stage import read_manifest
from conf.settings.compose import settings
from data_prep.config import DataPrepConfig
from data_prep.encode import Encoder, Mode, document_segments
from data_prep.pipeline import prepare
from data_prep.shards import SPLITS, Shards
from data_prep.vocab import load_tokenizer
from tests import bpe
from tests.conftest import vocab_of, write_rows

BAD_LINES = ['{"content": "x', '{"text": 1}', '{"content": "  "}', "[]"]
Args = Callable[..., list[str]]


@pytest.fixture(scope="session")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six parts in three languages: files of the standard library and a few bad rows."""
    root = tmp_path_factory.mktemp("jsonl")
    stdlib = Path(sysconfig.get_path("stdlib"))
    paths = sorted([*stdlib.glob("email/**/*.py"), *stdlib.glob("json/*.py")])
    texts = [text for path in paths if (text := path.read_text())]
    for index in range(6):
        part = root / f"lang{index % 3}" / f"{index}.jsonl"
        part.parent.mkdir(exist_ok=True)
        rows = [json.dumps({"content": text}) for text in texts[index::6]]
        part.write_text("\n".join([*rows, BAD_LINES[index % 4]]) + "\n")
    return root


def arguments(source: Path, data_folder: Path, tmp_path: Path) -> list[str]:
    return [
        *("data=jsonl", bpe.ADAPTIVE, "seq_len=512", "held_out=0.2", "workers=1"),
        *("shard_tokens=30000", "max_unreadable=0.5", f"data.path={source}"),
        *(f"tokenizer={data_folder}/tokenizer", f"out={tmp_path}/out"),
    ]


@pytest.fixture
def args(jsonl: Path, data_folder: Path, tmp_path: Path) -> Args:
    """Return a function that returns arguments to prepare `jsonl`, or `texts`, into tmp_path/out."""

    def build(*overrides: str, texts: Sequence[str] | None = None) -> list[str]:
        source = jsonl
        if texts is not None:
            source = tmp_path / "in"
            source.mkdir(exist_ok=True)
            write_rows(source / "a.jsonl", ({"content": text} for text in texts))
        return [*arguments(source, data_folder, tmp_path), *overrides]

    return build


def run(arguments: list[str]) -> None:
    prepare(settings("data_prep", DataPrepConfig, arguments))


def content(folder: Path) -> dict[str, bytes]:
    """Return the content of every file; the manifest without times and versions."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    result = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    manifest = read_manifest(folder, "shards", "out")
    for name in ("created", "commit", "seconds", "versions"):
        del manifest[name]
    return result | {"manifest.json": json.dumps(manifest, sort_keys=True).encode()}


def texts_of(folder: Path) -> dict[str, str]:
    """Return the text of every document, decoded from the shards."""
    encoder = Encoder(load_tokenizer(folder / "tokenizer"), vocab_of(folder))
    parts: dict[str, list[tuple[int, int, np.ndarray]]] = {}
    manifest = read_json(folder / "manifest.json")
    for split in (name for name in SPLITS if manifest[name]["sequences"]):
        for sequence in Shards(folder, split):
            for id, span in zip(sequence.ids, sequence.spans, strict=True):
                ids = sequence.tokens[span["start"] : span["stop"]]
                part = (int(span["offset"]), int(span["mode"]), ids)
                parts.setdefault(id, []).append(part)
    texts = {}
    for id, pieces in parts.items():
        pieces.sort(key=lambda piece: piece[0])
        ids = np.concatenate([piece[2] for piece in pieces]).tolist()
        texts[id] = text_of(ids, Mode(pieces[0][1]), encoder)
    return texts


def document_ids(
    text: str, mode: Mode, cuts: tuple[int, int], encoder: Encoder
) -> list[int]:
    """Return the ids of a document without EOS at its end."""
    segments = document_segments(
        text, mode, cuts, vocab=encoder.vocab, lead=encoder.lead, ends=False
    )
    return [
        id
        for part in segments
        for id in (encoder.encode([part])[0] if isinstance(part, str) else [part])
    ]


def text_of(ids: list[int], mode: Mode, encoder: Encoder) -> str:
    vocab = encoder.vocab
    ids = [i for i in ids if i not in (vocab.bos, vocab.eos)]
    strip = 1 if encoder.implicit_space else 0  # enc(s) = inf(" " + s)
    if mode is Mode.PLAIN:
        return encoder.decode(ids)[strip:]
    suf, mid, eot = (ids.index(x) for x in (vocab.suf, vocab.mid, vocab.eot))
    segments = (ids[1:suf], ids[mid + 1 : eot], ids[suf + 1 : mid])
    parts = [encoder.decode(part) for part in segments]
    led = 0 if mode is Mode.PSM else 1  # the part that was encoded with a leading space
    parts[led] = parts[led][strip:]
    return "".join(parts)
