"""Write and read token shards.

    <folder>/<split>-00000.tokens.npy    (sequences, seq_len) uint16 or uint32
    <folder>/<split>-00000.spans.npy     (spans,) SPAN records, by sequence and start
    <folder>/<split>-00000.names.npy     (bytes,) the documents' ids as UTF-8
    <folder>/<split>-00000.sums.npy      (sequences,) uint32, the CRC-32 of each sequence

Sequences are read by memory map, in any order and without a copy. After its last span a
sequence is padding. The manifest has the SHA-256 of each shard's sums.npy, which is checked
when the shard is opened. The CRC-32 of a sequence is checked when the sequence is read, in
microseconds. Hashing whole shards at every start would take as long as reading them.
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
ARRAYS = ("tokens", "spans", "names", "sums")
SPAN = np.dtype(
    [
        ("sequence", "<u4"),
        ("start", "<u4"),
        ("stop", "<u4"),
        ("offset", "<u4"),  # start of the part within its document
        ("prompt", "<u4"),  # number of leading tokens of the part without loss
        ("name", "<u4"),  # start of the document's id in the names, in bytes
        ("name_length", "<u4"),
        ("language", "<u2"),  # index into the manifest's languages
        ("mode", "u1"),  # data_prep.encode.Mode
    ]
)
MOST_LANGUAGES = 2**16  # a span has the language's index in 16 bits


def save_array(path: Path, array: np.ndarray) -> None:
    """Save an array as `np.save` does, but raise an OSError with errno, for example for a full disk."""
    # For a file opened with "+", NumPy uses Python's write. Its own C code raises without errno.
    with open(path, "w+b") as file:
        np.save(file, array)


class ShardWriter:
    """Writes a shard, sequence by sequence; `close` completes it."""

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
        """Append a sequence."""
        tokens = packed.tokens(self._seq_len, self._padding).astype(self._dtype)
        first = len(self._spans)
        self._file.write(tokens.tobytes())
        for span in packed.spans:
            document = span.document
            prompt = min(max(0, document.prompt - span.offset), span.stop - span.start)
            bounds = (self._sequences, span.start, span.stop, span.offset)
            self._spans.append(
                (
                    *bounds,
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
        """Return start and length of an id in the names; append it unless it was the last one."""
        encoded = id.encode()
        if self._last[0] != id:
            self._last = (id, len(self._names))
            self._names += encoded
        return self._last[1], len(encoded)

    def close(self) -> dict[str, Any]:
        """Complete the shard; return the numbers of sequences and tokens, and the SHA-256 of its sums."""
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
    """Return the CRC-32 of a sequence: its tokens, its spans and the ids of its documents."""
    crc = zlib.crc32(spans.tobytes(), zlib.crc32(tokens.data))
    for start, length in spans[["name", "name_length"]].tolist():
        crc = zlib.crc32(names[start : start + length], crc)
    return crc


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """A packed sequence of documents, read from a shard: its tokens, and where each document is."""

    tokens: np.ndarray  # (seq_len,) memory-mapped
    spans: np.ndarray  # (documents,) SPAN records
    names: np.ndarray  # (bytes,) the shard's names

    @property
    def used(self) -> int:
        """The number of tokens before the padding."""
        return int(self.spans["stop"][-1]) if len(self.spans) else 0

    @property
    def documents(self) -> np.ndarray:
        """The (seq_len,) int32 index of each token's document within the sequence, or -1.

        -1 marks padding and the tokens of a conversation's prompt, except the last token of the
        prompt, which predicts the first token of the answer:

            prompt       1  1  1  0  0          1  1  0          (1: prompt)
            documents   -1 -1  0  0  0  1  1   -1  2  2   -1
        """
        documents = np.full(len(self.tokens), -1, dtype=np.int32)
        for index, span in enumerate(self.spans):
            start = int(span["start"]) + max(0, int(span["prompt"]) - 1)
            documents[start : span["stop"]] = index
        return documents

    @property
    def ids(self) -> list[str]:
        """The ids of the documents, in the order of the spans."""
        return [
            self.names[start : start + length].tobytes().decode()
            for start, length in self.spans[["name", "name_length"]].tolist()
        ]


class Shards(Sequence[PackedSequence]):
    """All sequences of one split of a finished data folder.

    Raises UserError if the files differ from the manifest. Reading a sequence raises
    RankLocalError for a checksum mismatch.
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        manifest = read_manifest(folder, "shards", "data.path")
        listed = manifest[split]["shards"]
        self._paths = sorted(Path(folder).glob(f"{split}-*.tokens.npy"))
        if not listed or len(listed) != len(self._paths):
            raise UserError(
                f"{folder} must have all {len(listed)} shards of split '{split}' that its "
                f"manifest lists, at least 1, got {len(self._paths)}. Copy the folder "
                "again, or prepare the data again"
            )
        allow_many_files()  # each memory map keeps a file open
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
                f"{self._paths[shard]}: checksum mismatch of sequence {row}: this file or "
                "the shard's spans, names or sums are damaged. Copy the folder again, or "
                "prepare the data again"
            )
        return PackedSequence(tokens, spans, names)


def _open(
    path: Path, listed: Mapping[str, Any], seq_len: int
) -> tuple[np.ndarray, ...]:
    """Memory-map the tokens, spans, names and sums of a shard, and compare them with the manifest."""
    with as_user_error(f"{path} must match its manifest, got"):
        tokens, spans, names, sums = (
            np.load(path.with_name(path.name.replace("tokens", name)), mmap_mode="r")
            for name in ARRAYS
        )
        if (
            tokens.shape != (listed["sequences"], seq_len)
            or spans.dtype != SPAN
            or fingerprint_file(Path(sums.filename)) != listed["sums"]
        ):
            raise ValueError(
                f"tokens of shape {tokens.shape}, or a checksum mismatch of sums.npy"
            )
    return tokens, spans, names, sums
