"""Token shards on disk: writer and reader in one place.

    <folder>/<split>-00000.tokens.npy    (sequences, seq_len) uint16 or uint32
    <folder>/<split>-00000.spans.npy     (spans,) SPAN records, by sequence and start

Reading is by memory map, random access and without a copy. A sequence is padding after
its last span. The manifest that makes a folder valid is written by the pipeline.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from conf import UserError
from data_prep.packing import Packed

SPAN = np.dtype(
    [
        ("sequence", "<u4"),
        ("start", "<u4"),
        ("stop", "<u4"),
        ("offset", "<u4"),  # of the part within its document
        ("document", "<u8"),  # hash of the document's id
        ("language", "<u2"),  # index into the manifest's languages
        ("mode", "u1"),  # fim.Mode
    ]
)


class ShardWriter:
    """Collects packed sequences and writes them as shards of at most `shard_sequences`."""

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        seq_len: int,
        vocab_size: int,
        padding: int,
        shard_sequences: int = 8192,
    ) -> None:
        self._folder, self._split, self._seq_len, self._padding = folder, split, seq_len, padding
        self._dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        self._limit = shard_sequences
        self._rows: list[np.ndarray] = []
        self._spans: list[tuple[int, ...]] = []
        self.shards: list[dict[str, int]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, packed: Packed) -> None:
        """Append one sequence."""
        row = len(self._rows)
        self._rows.append(packed.tokens(self._seq_len, self._padding).astype(self._dtype))
        self._spans += [
            (row, s.start, s.stop, s.offset, s.document.hash, s.document.language, s.document.mode)
            for s in packed.spans
        ]
        if len(self._rows) == self._limit:
            self.flush()

    def flush(self) -> None:
        """Write what has been collected as one shard."""
        if not self._rows:
            return
        stem = self._folder / f"{self._split}-{len(self.shards):05d}"
        spans = np.array(self._spans, dtype=SPAN)
        np.save(f"{stem}.tokens.npy", np.stack(self._rows))
        np.save(f"{stem}.spans.npy", spans)
        used = int((spans["stop"].astype(np.int64) - spans["start"]).sum())
        self.shards.append({"sequences": len(self._rows), "tokens": used})
        self._rows, self._spans = [], []


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """One sequence as training reads it."""

    tokens: np.ndarray  # (seq_len,) memory-mapped
    spans: np.ndarray  # (documents,) SPAN records

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


class Shards(Sequence[PackedSequence]):
    """All sequences of one split of a finished data folder."""

    def __init__(self, folder: str | Path, split: str) -> None:
        paths = sorted(Path(folder).glob(f"{split}-*.tokens.npy"))
        if not paths:
            raise UserError(f"data.path={folder}: wanted shards of split '{split}', found none")
        try:
            self._tokens = [np.load(path, mmap_mode="r") for path in paths]
            self._spans = [np.load(_spans_beside(path), mmap_mode="r") for path in paths]
        except (OSError, ValueError) as error:
            raise UserError(f"data.path={folder}: wanted readable shards, found {error}") from error
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
        return PackedSequence(self._tokens[shard][row], self._spans[shard][start:stop])

    def __iter__(self) -> Iterator[PackedSequence]:
        return (self[index] for index in range(len(self)))


def _spans_beside(tokens: Path) -> Path:
    return tokens.with_name(tokens.name.replace(".tokens.", ".spans."))
