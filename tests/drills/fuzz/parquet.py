"""Parquet of every type and encoding, whole or damaged: rows in are documents and drops out, with their texts.

A damaged file's rows are those of the undamaged one, as far as they are read, where its pages have checksums;
where they have none nobody can tell, and what is held is only that every row is accounted for.
"""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.drills.fuzz import decoded, mutate, tools
from tests.drills.fuzz.rows import LEAD, check, options, whole

COUNT = 800
TYPES = {
    "text": (
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ),
    "other": (pa.int64(), pa.list_(pa.string()), pa.float32(), pa.timestamp("us"), pa.bool_()),
}


def run(rng: random.Random, folder: Path) -> str:
    """One or two files through data_prep."""
    expected: dict[str, tuple[str | None, str]] = {}
    harmed, summed = False, rng.random() < 0.7
    for name in ("py/a.parquet", "b.parquet")[: rng.choice((1, 1, 2))]:
        texts = written(rng, folder / "in" / name, checksums=summed)
        language = "py" if "/" in name else "none"
        expected |= {f"{name}:{row}": (text, language) for row, text in enumerate(texts)}
        if rng.random() < 0.4:
            harmed = True
            harm(rng, folder / "in" / name, pages=summed)
    wanted = options(rng)
    groups = ("data=starcoder", *tools.tokenizer(rng))
    plain = ["data.text=content", "data.id=[]", f"data.path={folder / 'in'}", f"out={folder / 'out'}", *wanted]
    ended = tools.prepared(groups, plain, rng)
    split = "data.split_chars=null" not in wanted
    if ended.told:
        assert not (folder / "out").exists(), "a refused folder is visible"
        good = any(text and text.strip() and "\0" not in text for text, _ in expected.values())
        assert harmed or not good, ended.told
        return "refused"
    if not harmed:
        check(folder / "out", expected, split=split)
        return "fine"
    manifest = json.loads((folder / "out" / "manifest.json").read_text("utf-8"))
    found = whole(decoded.documents(folder / "out"), split=split)
    files = {drop["file"] for drop in decoded.dropped(folder / "out") if drop["row"] is None}
    dropped = sum(manifest["drops"].values()) - manifest["counts"].get("broken files", 0)
    assert manifest["counts"].get("rows", 0) == dropped + len(found)
    if summed:
        for id, (language, text) in found.items():
            assert (text, language) == expected[id], f"{id}: {text!r} is read, {expected[id]} was written"
        lost = {id for id in expected if id.rpartition(":")[0] not in files} - set(found)
        told = {f"{drop['file']}:{drop['row']}" for drop in decoded.dropped(folder / "out")}
        assert lost <= told, f"lost without a word: {lost - told}"
    return "damaged"


def written(rng: random.Random, path: Path, *, checksums: bool) -> list[str | None]:
    """Write a file; the text of every row, None where it has none."""
    count = rng.choice((0, 1, 3, 70, 200))
    texts: list[str | None] = [tools.document(rng).encode("utf-8", "ignore").decode() for _ in range(count)]
    kind = rng.choice(TYPES["text" if rng.random() < 0.9 else "other"])
    texts = [None if rng.random() < 0.05 else text for text in texts]
    if kind in TYPES["other"]:
        values: Any = [None] * count
        texts = [None] * count
    else:
        values = texts if pa.types.is_string(kind) else [text and text.encode() for text in texts]
        values = texts if pa.types.is_dictionary(kind) else values
    columns = {"content": pa.array(values, kind), "x": pa.array(range(count))}
    if rng.random() < 0.3:
        columns = {"x": columns["x"], "content": columns["content"], "y": pa.array([[None]] * count)}
    if kind == pa.string() and count and rng.random() < 0.2:
        row = rng.randrange(count)
        raw = [text.encode() if text is not None else None for text in texts]
        raw[row], texts[row] = b"\xff\xfe", None
        columns["content"] = pa.array(raw, pa.binary()).view(pa.string())
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table(columns),
        path,
        row_group_size=rng.choice((1, 50, 1000)),
        compression=rng.choice(("none", "snappy", "zstd", "gzip")),
        use_dictionary=rng.random() < 0.5,
        data_page_size=rng.choice((100, 10**6)),
        data_page_version=rng.choice(("1.0", "2.0")),
        write_page_checksum=checksums,
    )
    first = [text.partition("\n") if text is not None else None for text in texts]
    return [
        None if parts is None else parts[2] if parts[1] and parts[0].startswith(LEAD) else "".join(parts)
        for parts in first
    ]


def harm(rng: random.Random, path: Path, *, pages: bool) -> None:
    """Damage a file; `pages` alone, without the footer, that no checksum guards."""
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    if pages and footer > 5:
        place = rng.randrange(4, footer)
        size = min(footer - place, rng.choice((1, 1, 4, 64)))
        path.write_bytes(data[:place] + rng.randbytes(size) + data[place + size :])
    else:
        path.write_bytes(mutate.damaged(data, rng))
