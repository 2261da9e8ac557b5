"""Sort encoded documents on disk between encoding and packing; collect held-out texts.

A document's key is a hash of its id. Sorting by key shuffles the documents, and a range of
keys is a random sample. The encoding task of a part writes runs, each sorted by key and small
enough for memory. A packing task reads one range of keys from the runs of all parts, so the
division into parts does not change its documents.

    <stem>.records    RECORD of each document, run after run
    <stem>.tokens     the ids of all documents, in the same order
    <stem>.names      the documents' ids as UTF-8, in the same order

Held-out documents are also saved as text, as prompts for measuring the model. For
conversations, `messages` has the messages before the answer.
"""

import json
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.document import Document
from data_prep.encode import Mode
from data_prep.packing import Encoded
from data_prep.shards import save_array

RECORD = np.dtype(
    [
        ("key", "<u8"),
        ("start", "<u8"),  # start of the document in <stem>.tokens, in tokens
        ("name", "<u8"),  # start of the document's id in <stem>.names, in bytes
        ("length", "<u4"),
        ("prompt", "<u4"),
        ("name_length", "<u4"),
        ("language", "<u4"),  # index into the part's languages
        ("mode", "u1"),
    ]
)
FILES = ("records", "tokens", "names")
RUN_BYTES = 2**27  # memory of a run
DOCUMENT_BYTES = 512  # memory of a document without its ids
TEXTS = "held_out.jsonl"
POSITIONS = "held_out.npy"


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest unsigned integer type that can store every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class RunWriter:
    """Writes documents as sorted runs; `close` completes the files."""

    def __init__(self, stem: Path, dtype: np.dtype, run_bytes: int = RUN_BYTES) -> None:
        self._dtype = dtype
        self._limit = run_bytes
        self._files = {name: open(f"{stem}.{name}", "wb") for name in FILES}  # noqa: SIM115 (until close)
        self._documents: list[tuple[int, Encoded]] = []
        self._bytes = 0
        self._bounds = [0]
        self._tokens = 0

    def add(self, key: int, document: Encoded) -> None:
        """Add a document to the current run."""
        ids = document.ids.astype(self._dtype)
        self._documents.append((key, replace(document, ids=ids)))
        self._bytes += ids.nbytes + DOCUMENT_BYTES
        if self._bytes >= self._limit:
            self._flush()

    def _flush(self) -> None:
        self._documents.sort(key=lambda keyed: keyed[0])
        records = []
        for key, document in self._documents:
            name = document.id.encode()
            starts = (self._tokens, self._files["names"].tell())
            lengths = (len(document.ids), document.prompt, len(name))
            records.append((key, *starts, *lengths, document.language, document.mode))
            self._files["names"].write(name)
            self._files["tokens"].write(document.ids.tobytes())
            self._tokens += len(document.ids)
        self._files["records"].write(np.array(records, dtype=RECORD).tobytes())
        self._bounds.append(self._bounds[-1] + len(records))
        self._documents = []
        self._bytes = 0

    def close(self) -> list[int]:
        """Write the last run and close the files; return the bounds of the runs in the records."""
        self._flush()
        for file in self._files.values():
            file.close()
        return self._bounds


def read_runs(
    stem: Path, bounds: Sequence[int], dtype: np.dtype, low: int, high: int
) -> Iterator[tuple[int, Encoded]]:
    """Yield (key, document) for low <= key < high, run after run."""
    if bounds[-1] == 0:  # an empty file cannot be mapped
        return
    records = np.memmap(f"{stem}.records", RECORD, "r")
    for first, last in zip(bounds, bounds[1:]):
        # Bisection reads only a few pages of a long run.
        start, stop = (
            first
            + bisect_left(
                range(first, last), key, key=lambda index: int(records[index]["key"])
            )
            for key in (low, high)
        )
        if start == stop:
            continue
        chosen = np.array(records[start:stop])
        begin = int(chosen["start"][0])
        end = int(chosen["start"][-1]) + int(chosen["length"][-1])
        ids = np.fromfile(
            f"{stem}.tokens", dtype, end - begin, offset=begin * dtype.itemsize
        )
        with open(f"{stem}.names", "rb") as names:
            names.seek(int(chosen["name"][0]))  # names are in the order of the records
            for key, token, _, length, prompt, *rest in chosen.tolist():
                name_length, language, mode = rest
                id = names.read(name_length).decode()
                own = ids[token - begin :][:length]
                yield key, Encoded(id, language, Mode(mode), own, prompt)


class HeldOutWriter:
    """Writes the held-out texts of a part, and on exit the positions of the texts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._positions = array("Q")  # key, start and stop of each document

    def __enter__(self) -> "HeldOutWriter":
        self._file = open(self._folder / TEXTS, "wb")  # noqa: SIM115 (until exit)
        return self

    def add(self, key: int, document: Document) -> None:
        """Append a document."""
        row: dict[str, Any] = {
            "id": document.id,
            "language": document.language,
            "content": document.text,
        }
        if document.messages:
            row["messages"] = document.messages[:-1]
        if document.tools:
            row["tools"] = document.tools
        start = self._file.tell()
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._positions.extend((key, start, self._file.tell()))

    def __exit__(self, *_: object) -> None:
        self._file.close()
        save_array(
            self._folder / POSITIONS,
            np.array(self._positions, dtype=np.uint64).reshape(-1, 3),
        )


def merge_held_out(folders: Sequence[Path], out: Path) -> None:
    """Write the held-out texts of all parts to one file, sorted by key, then by part."""
    by_part = [np.load(folder / POSITIONS) for folder in folders]
    parts = np.repeat(np.arange(len(folders)), [len(rows) for rows in by_part])
    positions = np.concatenate(by_part)
    with open(out, "wb") as file:
        for index in np.argsort(positions[:, 0], kind="stable").tolist():
            _, start, stop = positions[index].tolist()
            with open(folders[parts[index]] / TEXTS, "rb") as part:
                part.seek(start)
                file.write(part.read(stop - start))
