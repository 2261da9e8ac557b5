"""Token shards on disk: writer and reader in one place.

    <folder>/<split>-00000.tokens.npy    (sequences, seq_len) uint16 or uint32
    <folder>/<split>-00000.spans.npy     (spans,) SPAN records, by sequence and start
    <folder>/<split>-00000.names.npy     (bytes,) the documents' ids as UTF-8

Reading is by memory map, random access and without a copy. A sequence is padding after
its last span. The manifest that makes a folder valid is written by the pipeline.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf import UserError
from data_prep.packing import Packed

SPLITS = ("train", "held_out")
SPAN = np.dtype(
    [
        ("sequence", "<u4"),
        ("start", "<u4"),
        ("stop", "<u4"),
        ("offset", "<u4"),  # of the part within its document
        ("name", "<u4"),  # start of the document's id within the names
        ("name_length", "<u4"),
        ("language", "<u2"),  # index into the manifest's languages
        ("mode", "u1"),  # fim.Mode
    ]
)


def save_array(path: Path, array: np.ndarray) -> None:
    """`np.save`. Raises OSError that says why, where the disk cannot take it."""
    # Into a file that can be read too, NumPy writes as Python does: its own way has an error without a cause.
    with open(path, "w+b") as file:
        np.save(file, array)


class ShardWriter:
    """Writes one shard, sequence by sequence; `close` makes it readable."""

    def __init__(self, stem: Path, *, seq_len: int, dtype: np.dtype, padding: int) -> None:
        self._stem, self._seq_len, self._dtype, self._padding = stem, seq_len, dtype, padding
        self._file = open(f"{stem}.tokens.npy", "wb")  # noqa: SIM115 (until close)
        self._sequences = 0
        self._write_header()
        self._spans: list[tuple[int, ...]] = []
        self._names = bytearray()
        self._last: tuple[str | None, int] = (None, 0)

    def _write_header(self) -> None:
        described = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._sequences, self._seq_len),
        }
        # NumPy pads the header so that the first axis can grow in place.
        np.lib.format.write_array_header_1_0(self._file, described)

    def add(self, packed: Packed) -> None:
        """Append one sequence."""
        self._file.write(packed.tokens(self._seq_len, self._padding).astype(self._dtype).tobytes())
        for s in packed.spans:
            name, length = self._name(s.document.id)
            document = s.document
            self._spans.append(
                (self._sequences, s.start, s.stop, s.offset, name, length, document.language, document.mode)
            )
        self._sequences += 1

    def _name(self, id: str) -> tuple[int, int]:
        """Where an id stands among the names; one that was just written is not written again."""
        encoded = id.encode()
        if self._last[0] != id:
            self._last = (id, len(self._names))
            self._names += encoded
        return self._last[1], len(encoded)

    def close(self) -> dict[str, int]:
        """Finish the shard; its sequences and tokens."""
        spans = np.array(self._spans, dtype=SPAN)
        save_array(Path(f"{self._stem}.spans.npy"), spans)
        save_array(Path(f"{self._stem}.names.npy"), np.frombuffer(bytes(self._names), dtype=np.uint8))
        self._file.seek(0)
        self._write_header()
        self._file.close()
        tokens = int((spans["stop"].astype(np.int64) - spans["start"]).sum())
        return {"sequences": self._sequences, "tokens": tokens}


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """One sequence as training reads it."""

    tokens: np.ndarray  # (seq_len,) memory-mapped
    spans: np.ndarray  # (documents,) SPAN records
    names: np.ndarray  # (bytes,) the shard's names

    @property
    def used(self) -> int:
        """Tokens before the padding."""
        return int(self.spans["stop"][-1]) if len(self.spans) else 0

    @property
    def documents(self) -> np.ndarray:
        """(seq_len,) index of each token's document within the sequence, -1 for padding."""
        found = np.full(len(self.tokens), -1, dtype=np.int32)
        for index, span in enumerate(self.spans):
            found[span["start"] : span["stop"]] = index
        return found

    @property
    def ids(self) -> list[str]:
        """The id of each document, in the order of the spans."""
        bounds = ((int(span["name"]), int(span["name_length"])) for span in self.spans)
        return [self.names[start : start + length].tobytes().decode() for start, length in bounds]


class Shards(Sequence[PackedSequence]):
    """All sequences of one split of a finished data folder."""

    def __init__(self, folder: str | Path, split: str) -> None:
        paths = sorted(Path(folder).glob(f"{split}-*.tokens.npy"))
        if not paths:
            raise UserError(f"{folder}: wanted shards of split '{split}', found none")
        try:
            self._tokens = [np.load(path, mmap_mode="r") for path in paths]
            self._spans = [_load_beside(path, "spans") for path in paths]
            self._names = [_load_beside(path, "names") for path in paths]
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: wanted readable shards, found {error}") from error
        self._starts = np.cumsum([0] + [len(tokens) for tokens in self._tokens])
        self._bounds = [
            np.searchsorted(spans["sequence"], np.arange(len(tokens) + 1))
            for tokens, spans in zip(self._tokens, self._spans, strict=True)
        ]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> PackedSequence:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = index - int(self._starts[shard])
        start, stop = self._bounds[shard][row : row + 2]
        return PackedSequence(self._tokens[shard][row], self._spans[shard][start:stop], self._names[shard])

    def __iter__(self) -> Iterator[PackedSequence]:
        return (self[index] for index in range(len(self)))


def _load_beside(tokens: Path, kind: str) -> Any:
    return np.load(tokens.with_name(tokens.name.replace(".tokens.", f".{kind}.")), mmap_mode="r")
