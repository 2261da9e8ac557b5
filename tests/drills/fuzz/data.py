"""Source files, JSON lines and Parquet of any content, whole or damaged: every row is in the shards, where it
decodes back to its text, or is among the drops.

A damaged Parquet file's rows are those of the undamaged one as far as they are read, where its pages have
checksums; without them the check is only that every row is accounted for.
"""

import copy
import functools
import gzip
import json
import os
import random
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from conf import UserError, settings
from data_prep.config import DataPrepConfig
from data_prep.encode import Encoder, Mode
from data_prep.pipeline import prepare
from data_prep.shards import SPLITS, Shards
from data_prep.sources import UNREADABLE
from data_prep.vocab import Vocab, load_tokenizer
from tests.data_prep.conftest import text_of
from tests.drills.fuzz import mutate
from tests.drills.fuzz.setup import ROOT, Result, call, demo

COUNT = 2700
CODELLAMA = ROOT.parent / "shared" / "data" / "tokenizers" / "codellama-7b"
LEAD = ("<reponame>", "<filename>", "<gh_stars>")  # StarCoder's line of metadata, which is cut off
METADATA = ("<reponame>a/b<gh_stars>10\n", "<filename>x.py\n", "<gh_stars>0\n", "<reponame>", "<filename>")
PIECES = (
    "<s>",
    "</s>",
    " <PRE>",
    "▁<SUF>",
    "<MID>",
    "<EOT>",
    "<unk>",
    "<0x0A>",
    "▁",
    "<adaptive_1>",
    "Ġ",
    "▁▁",
)
LINES = (
    b"",
    b"  \t",
    b"[]",
    b"null",
    b"{}",
    b'"x"',
    b"NaN",
    b"{",
    b"\xff\xfe",
    b"\0",
    b"\r",
    b'{"content":1} x',
)
TYPES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string()))
NO_TEXT = (pa.int64(), pa.list_(pa.string()), pa.float32(), pa.timestamp("us"), pa.bool_())
Expected = dict[str, tuple[str | None, str]]  # text, None where a row has none, and language, by id


def run(rng: random.Random, folder: Path) -> str:
    return rng.choice((from_lines, from_parquet, from_files))(rng, folder)


def from_lines(rng: random.Random, folder: Path) -> str:
    expected: Expected = {}
    names = ("a.jsonl", "py/b.jsonl", "c/d.jsonl.gz", "py/e.jsonl.zst", "f.json")
    for name in rng.sample(names, rng.choice((1, 1, 2, 4))):
        lines = [_line(rng).replace(b"\n", b" ") for _ in range(rng.choice((0, 1, 5, 60)))]
        _write(folder / "in" / name, b"\n".join(lines) + rng.choice((b"", b"\n")))
        language = name.split("/")[0] if "/" in name else "none"
        expected |= {f"{name}:{n}": (read_line(b, n), language) for n, b in enumerate(lines) if b.strip()}
    options = _options(rng)
    result = prepared(("data=jsonl", *_tokenizer(rng)), folder, options, rng)
    if result.refusal:
        assert "must have documents" in result.refusal or "must have jsonl files" in result.refusal, result
        _check_refused(folder, expected, result)
        return "refused"
    check(folder / "out", expected, split="data.split_chars=null" not in options)
    return "fine"


def _line(rng: random.Random) -> bytes:
    row: dict[str, Any] = {"content": document(rng), "id": rng.randrange(9), "x": mutate.value(rng)}
    kind = rng.random()
    if kind < 0.6:
        return json.dumps(row, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if kind < 0.75:
        return mutate.changed_json(json.dumps(row).encode(), rng)
    if kind < 0.9:
        return mutate.damaged(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass"), rng)
    return rng.choice(LINES)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = pa.Codec("zstd").compress(data, asbytes=True)
    path.write_bytes(data)


def read_line(line: bytes, row: int) -> str | None:
    """Return the text of a row by the obvious reader; None where it has none."""
    try:
        text = json.loads(line.decode("utf-8-sig" if row == 0 else "utf-8"))["content"]
        text.encode("utf-8")
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, IndexError):
        return None
    return _without_lead(text)


def _without_lead(text: str) -> str:
    first, end, rest = text.partition("\n")
    return rest if end and first.startswith(LEAD) else text


def from_parquet(rng: random.Random, folder: Path) -> str:
    expected: Expected = {}
    damaged, checksums = False, rng.random() < 0.7
    for name in ("py/a.parquet", "b.parquet")[: rng.choice((1, 1, 2))]:
        texts = _write_parquet(rng, folder / "in" / name, checksums=checksums)
        expected |= {f"{name}:{n}": (text, "py" if "/" in name else "none") for n, text in enumerate(texts)}
        if rng.random() < 0.4:
            damaged = True
            _damage_parquet(rng, folder / "in" / name, pages=checksums)
    options = _options(rng)
    groups = ("data=starcoder", "data.text=content", "data.id=[]", *_tokenizer(rng))
    result, split = prepared(groups, folder, options, rng), "data.split_chars=null" not in options
    if result.refusal:
        _check_refused(folder, {} if damaged else expected, result)
        return "refused"
    if not damaged:
        check(folder / "out", expected, split=split)
        return "fine"
    manifest = json.loads((folder / "out" / "manifest.json").read_text("utf-8"))
    documents, drops = joined(decoded(folder / "out"), split=split), dropped(folder / "out")
    rows = sum(manifest["drops"].values()) - manifest["counts"].get("broken files", 0)
    assert manifest["counts"].get("rows", 0) == rows + len(documents)
    if checksums:
        for id, (language, text) in documents.items():
            assert (text, language) == expected[id], f"{id}: got {text!r}, written {expected[id]}"
        files = {drop["file"] for drop in drops if drop["row"] is None}
        lost = {id for id in expected if id.rpartition(":")[0] not in files} - set(documents)
        assert lost <= {f"{drop['file']}:{drop['row']}" for drop in drops}, f"lost in silence: {lost}"
    return "damaged"


def _write_parquet(rng: random.Random, path: Path, *, checksums: bool) -> list[str | None]:
    count, kind = rng.choice((0, 1, 3, 70, 200)), rng.choice(TYPES if rng.random() < 0.9 else NO_TEXT)
    texts: list[str | None] = [document(rng).encode("utf-8", "ignore").decode() for _ in range(count)]
    texts = [None if kind in NO_TEXT or rng.random() < 0.05 else text for text in texts]
    as_bytes = kind in (pa.binary(), pa.large_binary())
    column = pa.array([text.encode() if as_bytes and text is not None else text for text in texts], kind)
    if kind == pa.string() and count and rng.random() < 0.2:  # a text that is no UTF-8
        raw, row = [None if text is None else text.encode() for text in texts], rng.randrange(count)
        raw[row], texts[row] = b"\xff\xfe", None
        column = pa.array(raw, pa.binary()).view(pa.string())
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"x": pa.array(range(count)), "content": column, "y": pa.array([[None]] * count)}),
        path,
        row_group_size=rng.choice((1, 50, 1000)),
        compression=rng.choice(("none", "snappy", "zstd", "gzip")),
        use_dictionary=rng.random() < 0.5,
        data_page_size=rng.choice((100, 10**6)),
        data_page_version=rng.choice(("1.0", "2.0")),
        write_page_checksum=checksums,
    )
    return [None if text is None else _without_lead(text) for text in texts]


def _damage_parquet(rng: random.Random, path: Path, *, pages: bool) -> None:
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    if pages and footer > 5:
        place = rng.randrange(4, footer)
        size = min(footer - place, rng.choice((1, 1, 4, 64)))
        path.write_bytes(data[:place] + rng.randbytes(size) + data[place + size :])
    else:
        path.write_bytes(mutate.damaged(data, rng))


def from_files(rng: random.Random, folder: Path) -> str:
    """Prepare a folder of files with any names and bytes, links and pipes."""
    root = folder.resolve() / "in"
    root.mkdir()
    expected: Expected = {}
    for _ in range(rng.choice((0, 1, 5, 20))):
        place = root / "/".join(_name(rng) for _ in range(rng.choice((1, 1, 2))))
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place = place.parent.resolve() / place.name  # links to folders are not followed
            if place.exists() or place.is_symlink() or not _write_source(rng, place):
                continue
        except OSError:  # the file system has no such name
            continue
        id = place.relative_to(root).as_posix()
        legible = id.isprintable() or not any("\ud800" <= character <= "\udfff" for character in id)
        expected[id] = (_text(place) if legible else None, place.suffix.lstrip(".") or "none")
    options = _options(rng)
    result = prepared(("data=source", *_tokenizer(rng)), folder, options, rng)
    if result.refusal:
        _check_refused(folder, expected, result)
        return "refused"
    check(folder / "out", expected, split="data.split_chars=null" not in options, rows=False)
    return "fine"


def _name(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(("a", "b", "c")) + rng.choice((".py", ".py", ".c", "", ".tar.gz", ".PY", "."))
    raw = mutate.text(rng).encode("utf-8", "ignore") + rng.choice((b"", b"", b"", b"\xff"))
    name = os.fsdecode(raw.replace(b"/", b"").replace(b"\0", b"")[:200])
    return f"x{name}" if not name or name.startswith(".") else name  # hidden folders are excluded by default


def _write_source(rng: random.Random, place: Path) -> bool:
    kind = rng.random()
    if kind < 0.9:
        data = document(rng).encode("utf-8", "surrogatepass")
        place.write_bytes(mutate.damaged(data, rng) if rng.random() < 0.2 else data)
    elif kind < 0.95:  # to itself, to nothing, or to a file
        os.symlink(rng.choice((place.name, "nothing", *os.listdir(place.parent))), place)
    else:
        os.mkfifo(place)
    return place.is_file()


def _text(place: Path) -> str | None:
    try:
        return place.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None


def _tokenizer(rng: random.Random) -> tuple[str, ...]:
    if CODELLAMA.is_dir() and rng.random() < 0.1:
        return (f"tokenizer={CODELLAMA}", "vocab=codellama")
    return (f"tokenizer={demo() / 'data' / 'tokenizer'}", "vocab=demo")


def _options(rng: random.Random) -> list[str]:
    options = ["workers=1", "max_unreadable=1.0", "decontaminate.humaneval=null", f"seed={rng.randrange(100)}"]
    options += [f"filters.{name}=null" for name in ("mean_line", "longest_line", "alphanumeric")]
    options += [f"fim_rate={rng.choice((0, 0.5, 1))}", f"spm_rate={rng.choice((0, 0.5, 1))}"]
    options += [f"seq_len={rng.choice((16, 17, 100, 1000))}", f"shard_tokens={rng.choice((2000, 2**26))}"]
    options.append(f"data.split_chars={rng.choice(('null', 'null', 1, 7, 150))}")
    return [*options, f"held_out={rng.choice((0, 0.3, 1))}"]


def prepared(groups: tuple[str, ...], folder: Path, options: Sequence[str], rng: random.Random) -> Result:
    """Run data_prep on folder/in: as a command now and then, else without composing YAML each time."""
    options = [*options, f"data.path={folder / 'in'}", f"out={folder / 'out'}"]
    if rng.randrange(50) == 0:
        return call("data_prep", [*groups, *options], rng)
    config = copy.deepcopy(_composed(groups))
    for option in options:
        name, _, value = option.partition("=")
        *path, last = name.split(".")
        setattr(reduce(getattr, path, config), last, yaml.safe_load(value))
    try:
        prepare(replace(config))  # which checks the values
    except UserError as refusal:
        return Result(str(refusal))
    return Result("")


@functools.cache
def _composed(groups: tuple[str, ...]) -> DataPrepConfig:
    return settings("data_prep", DataPrepConfig, [*groups, "data.path=d", "out=o"])


def document(rng: random.Random) -> str:
    """Return a text: a piece of a real file, control pieces, anything, or all of them joined."""
    whole = rng.choice(_sources())
    start = rng.randrange(len(whole))
    ends = ("\n", "\r\n", "\x0c", "\u2028", "")
    kinds: list[Callable[[], str]] = [
        lambda: mutate.text(rng),
        lambda: rng.choice(METADATA) * rng.choice((1, 2)) + "x = 1\n",
        lambda: "".join(rng.choice((*PIECES, " ", "a", "\n")) for _ in range(rng.randrange(12))),
        lambda: "".join(mutate.text(rng)[:50] + rng.choice(ends) for _ in range(5)),
        lambda: whole[start : start + rng.choice((1, 40, 400, 3000))],
    ]
    return rng.choice(kinds)()


@functools.cache
def _sources() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    return [
        path.read_text("utf-8") for name in ("json", "email") for path in sorted((root / name).glob("*.py"))
    ]


def _check_refused(folder: Path, expected: Expected, result: Result) -> None:
    assert not (folder / "out").exists(), "a refused folder is visible"
    assert not any(text and text.strip() and "\0" not in text for text, _ in expected.values()), result.refusal


def check(out: Path, expected: Expected, *, split: bool, rows: bool = True) -> None:
    """Check that every document of `expected` is read back or dropped for a true reason.

    Ids are a file and its row or, without `rows`, the file alone.
    """
    manifest, drops = json.loads((out / "manifest.json").read_text("utf-8")), dropped(out)
    assert manifest["counts"].get("rows", 0) == len(expected)
    assert manifest["drops"] == dict(Counter(drop["reason"] for drop in drops))
    for drop in drops:
        text, _ = expected[f"{drop['file']}:{drop['row']}" if rows else drop["file"]]
        reasons = {"empty": text is not None and not text.strip(), "NUL bytes": "\0" in (text or "")}
        reasons |= dict.fromkeys(UNREADABLE, text is None)
        assert reasons[drop["reason"]], drop
    documents = joined(decoded(out), split=split)
    assert len(drops) + len(documents) == len(expected), f"{len(drops)} drops, {len(documents)} documents"
    for id, (language, text) in documents.items():
        assert (text, language) == expected[id], f"{id}: got {text!r} of {language}, written {expected[id]}"
    held_out = [json.loads(line) for line in (out / "held_out.jsonl").read_bytes().split(b"\n") if line]
    pieces = [(row["id"], row["language"], row["content"]) for row in held_out]
    for id, piece in joined(pieces, split=split).items():
        assert documents[id] == piece, f"held out {id}: {piece}"
    size = manifest["vocab"]["size"]
    assert all(int(np.load(path).max(initial=0)) < size for path in out.glob("*.tokens.npy"))


def dropped(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "drops.jsonl").read_bytes().split(b"\n") if line]


def decoded(out: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (id, language, text) of every document, or piece of one, of the shards."""
    manifest = json.loads((out / "manifest.json").read_text("utf-8"))
    vocab = Vocab.from_json(manifest["vocab"])
    encoder = Encoder(load_tokenizer(out / "tokenizer"), vocab)
    for split in SPLITS:
        assert bool(manifest[split]["shards"]) == any(out.glob(f"{split}-*.tokens.npy"))
        if not manifest[split]["shards"]:
            continue
        parts: dict[str, tuple[str, Mode, list[int]]] = {}
        for sequence in Shards(out, split):
            for id, span in zip(sequence.ids, sequence.spans, strict=True):
                language, mode = manifest["languages"][int(span["language"])], Mode(span["mode"])
                ids = parts.setdefault(id, (language, mode, []))[2]
                assert span["offset"] == len(ids), f"{id}: a part is missing"
                ids += sequence.tokens[span["start"] : span["stop"]].tolist()
        for id, (language, mode, ids) in parts.items():
            yield id, language, text_of(ids, mode, vocab, encoder)


def joined(pieces: Iterable[tuple[str, str, str]], *, split: bool) -> dict[str, tuple[str, str]]:
    """Return language and text by id of documents that may be in pieces, `ID#NUMBER`."""
    parts: dict[str, dict[int, tuple[str, str]]] = {}
    for id, language, text in pieces:
        stem, number = (id.rpartition("#")[0], int(id.rpartition("#")[2])) if split else (id, 0)
        assert number not in parts.setdefault(stem, {}), f"{id} came twice"
        parts[stem][number] = (language, text)
    for id, own in parts.items():
        assert sorted(own) == list(range(len(own))), f"{id}: pieces {sorted(own)}"
    return {id: (own[0][0], "".join(own[n][1] for n in range(len(own)))) for id, own in parts.items()}
