"""Token shards on disk: writer and reader in one place.

    <folder>/<split>-00000.tokens.npy    (sequences, seq_len) uint16 or uint32
    <folder>/<split>-00000.spans.npy     (spans,) SPAN records, by sequence and start
    <folder>/<split>-00000.names.npy     (bytes,) the documents' ids as UTF-8
    <folder>/<split>-00000.sums.npy      (sequences,) uint32, the CRC-32 of each sequence

Reading is by memory map, in any order and without a copy. A sequence is padding after its
last span. The manifest has the SHA-256 of each shard's sums: opening a shard compares the
sums with it, and reading a sequence compares the sequence with its sum, which takes
microseconds; to hash whole shards at every start would take as long as reading them.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import RankLocalError, UserError, as_user_error
from conf.runs.files import allow_many_files
from conf.runs.fingerprint import fingerprint_file
from conf.runs.stage import read_manifest
from data_prep.packing import SequenceSpans

SPLITS = ("train", "held_out")
KINDS = ("tokens", "spans", "names", "sums")
SPAN = np.dtype(
    [
        ("sequence", "<u4"),
        ("start", "<u4"),
        ("stop", "<u4"),
        ("offset", "<u4"),  # of the part within its document
        ("prompt", "<u4"),  # leading tokens of the part that have no loss
        ("name", "<u4"),  # start of the document's id within the names
        ("name_length", "<u4"),
        ("language", "<u2"),  # index into the manifest's languages
        ("mode", "u1"),  # encode.Mode
    ]
)


def save_array(path: Path, array: np.ndarray) -> None:
    """Save as `np.save` does; an OSError has its cause, such as a full disk."""
    # NumPy writes a file opened for reading too by Python's write; its own has no errno.
    with open(path, "w+b") as file:
        np.save(file, array)


class ShardWriter:
    """Writes one shard, sequence by sequence; `close` makes it readable."""

    def __init__(
        self, stem: Path, *, seq_len: int, dtype: np.dtype, padding: int
    ) -> None:
        self._stem = stem
        self._seq_len = seq_len
        self._dtype = dtype
        self._padding = padding
        self._file = open(f"{stem}.tokens.npy", "wb")  # noqa: SIM115 (until close)
        self._sequences = 0
        self._write_header()
        self._spans: list[tuple[int, ...]] = []
        self._names = bytearray()
        self._sums: list[int] = []
        self._last: tuple[str | None, int] = (None, 0)

    def _write_header(self) -> None:
        described = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._sequences, self._seq_len),
        }
        # NumPy pads the header so that the first axis can grow in place.
        np.lib.format.write_array_header_1_0(self._file, described)

    def add(self, packed: SequenceSpans) -> None:
        """Append one sequence."""
        tokens = packed.tokens(self._seq_len, self._padding).astype(self._dtype)
        first = len(self._spans)
        self._file.write(tokens.tobytes())
        for span in packed.spans:
            document = span.document
            prompt = min(max(0, document.prompt - span.offset), span.stop - span.start)
            place = (self._sequences, span.start, span.stop, span.offset)
            self._spans.append(
                (
                    *place,
                    prompt,
                    *self._name(document.id),
                    document.language,
                    document.mode,
                )
            )
        self._sums.append(
            checksum(tokens, np.array(self._spans[first:], dtype=SPAN), self._names)
        )
        self._sequences += 1

    def _name(self, id: str) -> tuple[int, int]:
        """Return the place of an id among the names; write it unless it was the last."""
        encoded = id.encode()
        if self._last[0] != id:
            self._last = (id, len(self._names))
            self._names += encoded
        return self._last[1], len(encoded)

    def close(self) -> dict[str, Any]:
        """Finish the shard; return its sequences, tokens and its sums' SHA-256."""
        spans = np.array(self._spans, dtype=SPAN)
        save_array(Path(f"{self._stem}.spans.npy"), spans)
        save_array(
            Path(f"{self._stem}.names.npy"),
            np.frombuffer(bytes(self._names), dtype=np.uint8),
        )
        sums = Path(f"{self._stem}.sums.npy")
        save_array(sums, np.array(self._sums, dtype="<u4"))
        self._file.seek(0)
        self._write_header()
        self._file.close()
        tokens = int((spans["stop"].astype(np.int64) - spans["start"]).sum())
        return {
            "sequences": self._sequences,
            "tokens": tokens,
            "sums": fingerprint_file(sums),
        }


def checksum(tokens: np.ndarray, spans: np.ndarray, names: Any) -> int:
    """Return the CRC-32 of a sequence: its tokens, its spans and their names."""
    crc = zlib.crc32(spans.tobytes(), zlib.crc32(tokens.data))
    for start, length in spans[["name", "name_length"]].tolist():
        crc = zlib.crc32(names[start : start + length], crc)
    return crc


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
        """(seq_len,) index of each token's document within the sequence, or -1.

        -1 marks padding, and the prompt of a conversation but its last token, which
        predicts the answer's first:

            prompt       1  1  1  0  0          1  1  0          (1: of the prompt)
            documents   -1 -1  0  0  0  1  1   -1  2  2   -1
        """
        documents = np.full(len(self.tokens), -1, dtype=np.int32)
        for index, span in enumerate(self.spans):
            start = int(span["start"]) + max(0, int(span["prompt"]) - 1)
            documents[start : span["stop"]] = index
        return documents

    @property
    def ids(self) -> list[str]:
        """The id of each document, in the order of the spans."""
        return [
            self.names[start : start + length].tobytes().decode()
            for start, length in self.spans[["name", "name_length"]].tolist()
        ]


class Shards(Sequence[PackedSequence]):
    """All sequences of one split of a finished data folder.

    Raises UserError for files that are not those of the manifest, and RankLocalError, on
    reading, for a sequence whose checksum differs.
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        manifest = read_manifest(folder, "shards", "data.path")
        listed = manifest[split]["shards"]
        self._paths = sorted(Path(folder).glob(f"{split}-*.tokens.npy"))
        if not listed or len(listed) != len(self._paths):
            raise UserError(
                f"{folder} must have shards of split '{split}', all of the "
                f"{len(listed)} that its manifest lists, got {len(self._paths)}. Copy "
                "them anew, or prepare the data again"
            )
        allow_many_files()  # each of a shard's memory maps has one open
        opened = [
            _open(path, facts, manifest["seq_len"])
            for path, facts in zip(self._paths, listed, strict=True)
        ]
        self._tokens, self._spans, self._names, self._sums = zip(*opened, strict=True)
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
        tokens = self._tokens[shard][row]
        spans = self._spans[shard][start:stop]
        names = self._names[shard]
        if checksum(tokens, spans, names) != self._sums[shard][row]:
            raise RankLocalError(
                f"{self._paths[shard]}: checksum mismatch of sequence {row}, here or in "
                "the files beside it. Copy them anew, or prepare the data again"
            )
        return PackedSequence(tokens, spans, names)


def _open(
    path: Path, listed: Mapping[str, Any], seq_len: int
) -> tuple[np.ndarray, ...]:
    """Map tokens, spans, names and sums of a shard, which the manifest describes."""
    with as_user_error(f"{path} must be what its manifest says, got"):
        tokens, spans, names, sums = (
            np.load(path.with_name(path.name.replace("tokens", kind)), mmap_mode="r")
            for kind in KINDS
        )
        if (
            tokens.shape != (listed["sequences"], seq_len)
            or spans.dtype != SPAN
            or fingerprint_file(Path(sums.filename)) != listed["sums"]
        ):
            raise ValueError(
                f"tokens of shape {tokens.shape}, or a checksum mismatch of its sums"
            )
    return tokens, spans, names, sums
