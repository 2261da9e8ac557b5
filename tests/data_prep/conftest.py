"""A small real input in several parts, what one worker makes of it, and the documents in shards."""

import json
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from conf import settings
from conf.stage import read_manifest
from data_prep.config import DataPrepConfig
from data_prep.encode import Encoder, Mode
from data_prep.pipeline import prepare
from data_prep.shards import Shards
from data_prep.vocab import Vocab, load_tokenizer

BAD_LINES = ['{"content": "x', '{"text": 1}', '{"content": "  "}', "[]"]


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six parts of three languages: files of the standard library, and a few bad rows."""
    root = tmp_path_factory.mktemp("jsonl")
    paths = sorted(Path(sysconfig.get_path("stdlib"), "email").rglob("*.py"))
    paths += sorted(Path(sysconfig.get_path("stdlib"), "json").rglob("*.py"))
    paths = [path for path in paths if path.stat().st_size]
    for index in range(6):
        part = root / f"lang{index % 3}" / f"{index}.jsonl"
        part.parent.mkdir(exist_ok=True)
        rows = [json.dumps({"content": path.read_text()}) for path in paths[index::6]]
        part.write_text("\n".join([*rows, BAD_LINES[index % 4]]) + "\n")
    return root


def arguments(jsonl: Path, tokenizer: Path, out: Path, *more: str) -> list[str]:
    return [
        "data=jsonl",
        "vocab=demo",
        f"data.path={jsonl}",
        f"tokenizer={tokenizer}",
        "seq_len=512",
        "held_out=0.2",
        "shard_tokens=30000",
        "max_unreadable=0.5",
        f"out={out}",
        *more,
    ]


@pytest.fixture
def args(jsonl: Path, data_folder: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function: the arguments that prepare `jsonl`, or a file of `texts`, into tmp_path / "out"."""

    def build(*more: str, texts: Sequence[str] | None = None) -> list[str]:
        source = jsonl
        if texts is not None:
            source = tmp_path / "in"
            source.mkdir(exist_ok=True)
            (source / "a.jsonl").write_text(
                "".join(json.dumps({"content": text}) + "\n" for text in texts)
            )
        return arguments(
            source, data_folder / "tokenizer", tmp_path / "out", "workers=1", *more
        )

    return build


def run(arguments: list[str]) -> None:
    prepare(settings("data_prep", DataPrepConfig, arguments))


def content(folder: Path) -> dict[str, bytes]:
    """Every file; of the manifest what does not tell of the run."""
    files = {
        str(path.relative_to(folder)): path
        for path in folder.rglob("*")
        if path.is_file()
    }
    manifest = read_manifest(folder, "shards", "out")
    for name in ("created", "commit", "seconds", "versions"):
        del manifest[name]
    result = {
        name: path.read_bytes()
        for name, path in files.items()
        if name != "manifest.json"
    }
    return {**result, "manifest": json.dumps(manifest, sort_keys=True).encode()}


@pytest.fixture(scope="module")
def expected(
    jsonl: Path, data_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """What one worker makes, in one go."""
    out = tmp_path_factory.mktemp("expected") / "out"
    run(arguments(jsonl, data_folder / "tokenizer", out, "workers=1"))
    assert len(read_manifest(out, "shards", "out")["train"]["shards"]) > 2
    return content(out)


def texts_of(folder: Path) -> dict[str, str]:
    """Every document's text, decoded from the shards."""
    manifest = json.loads((folder / "manifest.json").read_text())
    vocab = Vocab.from_json(manifest["vocab"])
    encoder = Encoder(load_tokenizer(folder / "tokenizer"), vocab)
    parts: dict[str, list[tuple[int, int, np.ndarray]]] = {}
    for split in {path.name.split("-")[0] for path in folder.glob("*.tokens.npy")}:
        for sequence in Shards(folder, split):
            for id, span in zip(sequence.ids, sequence.spans, strict=True):
                ids = sequence.tokens[span["start"] : span["stop"]]
                parts.setdefault(id, []).append(
                    (int(span["offset"]), int(span["mode"]), ids)
                )
    texts = {}
    for id, pieces in parts.items():
        pieces.sort(key=lambda piece: piece[0])
        ids = np.concatenate([piece[2] for piece in pieces]).tolist()
        texts[id] = text_of(ids, Mode(pieces[0][1]), vocab, encoder)
    return texts


def text_of(ids: list[int], mode: Mode, vocab: Vocab, encoder: Encoder) -> str:
    ids = [i for i in ids if i not in (vocab.bos, vocab.eos)]
    strip = 1 if encoder.implicit_space else 0  # enc(s) = inf(" " + s)
    if mode is Mode.PLAIN:
        return encoder.decode(ids)[strip:]
    suf, mid, eot = (ids.index(x) for x in (vocab.suf, vocab.mid, vocab.eot))
    first, suffix, last = ids[1:suf], ids[suf + 1 : mid], ids[mid + 1 : eot]
    parts = [encoder.decode(part) for part in (first, last, suffix)]
    led = 0 if mode is Mode.PSM else 1  # which part was encoded with the leading space
    parts[led] = parts[led][strip:]
    return "".join(parts)
