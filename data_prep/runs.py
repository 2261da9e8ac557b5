"""Encoded documents on the way from reading to packing: runs, each sorted by key.

The key is a hash of the document's id, so that sorting by it shuffles all documents, and
a range of keys is a random part of them. Readers of the input write runs as memory
allows; a packer reads one range of keys from the runs of all readers. What it gets does
not depend on how the input was divided.

    <stem>.records    RECORD of each document, run after run
    <stem>.tokens     the ids of all documents, in the same order
    <stem>.names      the documents' ids as UTF-8, in the same order
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from data_prep.encode.fim import Mode
from data_prep.packing import Encoded

RECORD = np.dtype(
    [
        ("key", "<u8"),
        ("start", "<u8"),  # of its ids within the tokens, in tokens
        ("name", "<u8"),  # start of its id within the names, in bytes
        ("length", "<u4"),
        ("name_length", "<u4"),
        ("language", "<u2"),  # index into the part's languages
        ("mode", "u1"),
    ]
)
KINDS = ("records", "tokens", "names")
RUN_BYTES = 2**27  # that a run holds in memory
DOCUMENT_BYTES = 512  # that a document takes there beside its ids


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned integers that hold every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class RunWriter:
    """Sorts documents into runs; `close` makes them readable."""

    def __init__(self, stem: Path, dtype: np.dtype, run_bytes: int = RUN_BYTES) -> None:
        self._dtype, self._limit = dtype, run_bytes
        self._files = {kind: open(f"{stem}.{kind}", "wb") for kind in KINDS}  # noqa: SIM115 (until close)
        self._documents: list[tuple[int, Encoded]] = []
        self._held = 0
        self._bounds = [0]
        self._tokens = 0

    def add(self, key: int, document: Encoded) -> None:
        """Take one document."""
        ids = document.ids.astype(self._dtype)
        self._documents.append((key, replace(document, ids=ids)))
        self._held += ids.nbytes + DOCUMENT_BYTES
        if self._held >= self._limit:
            self._flush()

    def _flush(self) -> None:
        self._documents.sort(key=lambda keyed: keyed[0])
        records = np.zeros(len(self._documents), dtype=RECORD)
        for record, (key, document) in zip(records, self._documents, strict=True):
            name = document.id.encode()
            record["key"], record["start"], record["length"] = key, self._tokens, len(document.ids)
            record["name"], record["name_length"] = self._files["names"].tell(), len(name)
            record["language"], record["mode"] = document.language, document.mode
            self._files["names"].write(name)
            self._files["tokens"].write(document.ids.tobytes())
            self._tokens += len(document.ids)
        self._files["records"].write(records.tobytes())
        self._bounds.append(self._bounds[-1] + len(records))
        self._documents, self._held = [], 0

    def close(self) -> list[int]:
        """Write what is left; the bounds of the runs within the records."""
        self._flush()
        for file in self._files.values():
            file.close()
        return self._bounds


def read_runs(
    stem: Path, bounds: Sequence[int], dtype: np.dtype, low: int, high: int
) -> Iterator[tuple[int, Encoded]]:
    """The documents with low <= key < high, run after run, each with its key."""
    if bounds[-1] == 0:  # an empty file cannot be mapped
        return
    records = np.memmap(f"{stem}.records", RECORD, "r")
    for first, last in zip(bounds, bounds[1:]):
        # By bisection, so that of a long run only a few pages are read.
        start, stop = (
            first + bisect_left(range(first, last), key, key=lambda index: int(records[index]["key"]))
            for key in (low, high)
        )
        if start == stop:
            continue
        chosen = np.array(records[start:stop])
        begin, end = int(chosen["start"][0]), int(chosen["start"][-1]) + int(chosen["length"][-1])
        offset = begin * dtype.itemsize
        ids = np.fromfile(f"{stem}.tokens", dtype, end - begin, offset=offset)
        begin_name, end_name = int(chosen["name"][0]), int(chosen["name"][-1]) + int(chosen["name_length"][-1])
        names = np.fromfile(f"{stem}.names", np.uint8, end_name - begin_name, offset=begin_name).tobytes()
        for key, place, name, length, name_length, language, mode in chosen.tolist():
            id = names[name - begin_name : name - begin_name + name_length].decode()
            yield key, Encoded(id, language, Mode(mode), ids[place - begin :][:length])
