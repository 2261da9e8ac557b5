"""JSON lines, as damaged as can be: every row is in the shards and decodes back, or is told among the drops.

What a row holds is told by a reader of its own here, the obvious one.
"""

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.sources import UNREADABLE
from tests.drills.fuzz import decoded, mutate, tools

COUNT = 1200
NAMES = ("a.jsonl", "py/b.jsonl", "c/d.jsonl.gz", "py/e.jsonl.zst", "f.json")
LEAD = ("<reponame>", "<filename>", "<gh_stars>")
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
    b'{"content": "a"} x',
    b"\r",
)


def run(rng: random.Random, folder: Path) -> str:
    """Some files of fuzzed rows through data_prep."""
    expected: dict[str, tuple[str | None, str]] = {}
    for name in rng.sample(
        ("a.jsonl", "py/b.jsonl", "c/d.jsonl.gz", "py/e.jsonl.zst", "f.json"), rng.choice((1, 1, 2, 4))
    ):
        lines = [line(rng).replace(b"\n", b" ") for _ in range(rng.choice((0, 1, 5, 60)))]
        write(folder / "in" / name, b"\n".join(lines) + rng.choice((b"", b"\n")))
        for row, one in enumerate(lines):
            if one.strip():
                language = name.split("/")[0] if "/" in name else "none"
                expected[f"{name}:{row}"] = (text_of(one, row), language)
    wanted = options(rng)
    groups = ("data=jsonl", *tools.tokenizer(rng))
    ended = tools.prepared(groups, [f"data.path={folder / 'in'}", f"out={folder / 'out'}", *wanted], rng)
    if ended.told:
        assert not (folder / "out").exists(), "a refused folder is visible"
        assert "must have documents" in ended.told or "must have jsonl files" in ended.told, ended.told
        readable = [text for text, _ in expected.values() if text is not None and text.strip()]
        assert not readable or "empty" not in ended.told, ended.told
        return "refused"
    check(folder / "out", expected, split="data.split_chars=null" not in wanted)
    return "fine"


def options(rng: random.Random) -> list[str]:
    """Settings that must change no text. Limits on lines only where rows may be dropped by them."""
    found = ["workers=1", "max_unreadable=1.0", "decontaminate.humaneval=null"]
    found += [f"filters.{name}={value}" for name, value in tools.WIDE.items()]
    found += [f"fim_rate={rng.choice((0, 0.5, 1))}", f"spm_rate={rng.choice((0, 0.5, 1))}"]
    length = rng.choice((16, 17, 100, 1000))
    found += [f"seq_len={length}", f"shard_tokens={rng.choice((2000, 2**26))}"]
    found += [
        f"data.split_chars={rng.choice(('null', 'null', 1, 7, 150))}",
        f"held_out={rng.choice((0, 0.3, 1))}",
    ]
    return [*found, f"seed={rng.randrange(100)}"]


def line(rng: random.Random) -> bytes:
    """A row of JSON, or what is nearly one."""
    row: dict[str, Any] = {"content": tools.document(rng), "id": rng.randrange(9), "x": mutate.value(rng)}
    kind = rng.random()
    if kind < 0.6:
        return json.dumps(row, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if kind < 0.75:
        return mutate.changed_json(json.dumps(row).encode(), rng)
    if kind < 0.9:
        return mutate.damaged(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass"), rng)
    return rng.choice(LINES)


def write(path: Path, data: bytes) -> None:
    """A file, packed as its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = pa.Codec("zstd").compress(data, asbytes=True)
    path.write_bytes(data)


def text_of(line: bytes, row: int) -> str | None:
    """The text of a row; None where it has none that can be read."""
    try:
        found = json.loads(line.decode("utf-8-sig" if row == 0 else "utf-8"))
        text = found["content"]
        text.encode("utf-8")
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, IndexError):
        return None
    first, end, rest = text.partition("\n")
    return rest if end and first.startswith(LEAD) else text


def check(out: Path, expected: dict[str, tuple[str | None, str]], *, split: bool, rows: bool = True) -> None:
    """`expected` are text and language by id, a file and its row or, without `rows`, the file alone: every one
    must be found, or told.
    """
    manifest = json.loads((out / "manifest.json").read_text("utf-8"))
    drops = decoded.dropped(out)
    assert manifest["counts"].get("rows", 0) == len(expected)
    assert manifest["drops"] == dict(Counter(drop["reason"] for drop in drops))
    told = {f"{drop['file']}:{drop['row']}" if rows else drop["file"]: drop for drop in drops}
    for id, drop in told.items():
        assert id in expected, f"a drop of no row: {drop}"
        text, _ = expected[id]
        if drop["reason"] in UNREADABLE:
            assert text is None, f"a good row is dropped: {drop}"
        elif drop["reason"] == "empty":
            assert text is not None and not text.strip(), drop
        elif drop["reason"] == "NUL bytes":
            assert text is not None and "\0" in text, drop
        else:
            raise AssertionError(f"no such reason: {drop}")
    found = whole(decoded.documents(out), split=split)
    assert len(told) + len(found) == len(expected), (
        f"{len(told)} drops, {len(found)} found, {len(expected)} rows"
    )
    for id, (language, text) in found.items():
        assert (text, language) == expected[id], f"{id}: {text!r} of {language}, wanted {expected[id]}"
    for id, (language, text) in whole(decoded.held_out(out), split=split).items():
        assert found[id] == (language, text), f"held out {id}: {text!r}"
    assert decoded.ids_are_in_range(out)


def whole(pieces: Any, *, split: bool) -> dict[str, tuple[str, str]]:
    """Language and text by id, of documents that may have come in pieces."""
    parts: dict[str, dict[int, tuple[str, str]]] = {}
    for id, language, text in pieces:
        stem, number = (id.rpartition("#")[0], int(id.rpartition("#")[2])) if split else (id, 0)
        assert number not in parts.setdefault(stem, {}), f"{id} came twice"
        parts[stem][number] = (language, text)
    for id, own in parts.items():
        assert sorted(own) == list(range(len(own))), f"{id}: pieces {sorted(own)}"
    return {id: (own[0][0], "".join(own[n][1] for n in range(len(own)))) for id, own in parts.items()}
