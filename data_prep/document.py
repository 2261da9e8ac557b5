"""Documents and drops, and the random decisions about documents.

Every decision is a hash of the seed and the document's id, so that neither the number of
workers nor their order changes a byte of the output.
"""

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np

from conf.text.conversations import Message, text_of


class Turn(NamedTuple):
    """An answer of a conversation, in ids of the chat template."""

    message: int  # the answer's index among the messages
    prompt: int  # leading ids that are of the messages before it
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Document:
    """A source file, a conversation, or a piece of one.

    `file` and `row` say where it was read. `held_out` documents are never trained on.
    `ends` is False for a piece that is not its file's last, and for a conversation whose
    last answer was cut off: no EOS or end of turn follows. The text of `messages` is
    their contents and calls; `turns` are the answers, once data_prep.chat has encoded them.
    """

    id: str
    text: str
    language: str
    file: str = ""
    row: int = 0
    held_out: bool = False
    ends: bool = True
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()  # that the messages may call
    turns: tuple[Turn, ...] = ()

    def drop(self, reason: str, detail: str = "") -> "Drop":
        """Return the document, dropped for a reason."""
        return Drop(reason, self.file, self.row, self.id, detail)


@dataclass(frozen=True, slots=True)
class Drop:
    """A row that is left out, the reason, and where to find it."""

    reason: str
    file: str
    row: int | None = None  # None: the whole file
    id: str = ""
    detail: str = ""


R = TypeVar("R", bound="Document | Drop")
BATCH = 256  # rows at once
BATCH_CHARS = 1_000_000


def in_words(drops: Counter[str]) -> str:
    """Return counts by reason for an error's sentence, the most frequent first."""
    return (
        ", ".join(f"{count} {reason}" for reason, count in drops.most_common())
        or "none"
    )


def hash64(*names: object) -> int:
    """Return a stable 64-bit hash of the names."""
    joined = "\x1f".join(map(str, names)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")


def unit(*names: object) -> float:
    """Return a number in [0, 1), uniform over names and the same on every machine."""
    return (hash64(*names) >> 11) / 2**53


def generator(*names: object) -> np.random.Generator:
    """Return a random generator keyed by the names."""
    return np.random.Generator(np.random.PCG64(hash64(*names)))


def is_held_out(id: str, *, seed: int, share: float) -> bool:
    """Return True if the document is held out of training, as `share` of all are."""
    return unit(seed, "held_out", id) < share


def held_out_share(ids: Iterable[str], *, seed: int, share: float, least: int) -> float:
    """Return the share to hold out: at least `least` of these ids, at most a fifth."""
    numbers = sorted(unit(seed, "held_out", id) for id in ids)
    least = min(least, len(numbers) // 5) if share else 0
    return max(share, math.nextafter(numbers[least - 1], 1.0)) if least else share


def order(id: str, *, seed: int) -> int:
    """Return the sort key that shuffles documents."""
    return hash64(seed, "order", id)


def batches(rows: Iterable[R]) -> Iterator[list[R]]:
    """Yield groups of rows, in order, of bounded size."""
    batch: list[R] = []
    chars = 0
    for row in rows:
        batch.append(row)
        chars += len(row.text) if isinstance(row, Document) else 0
        if len(batch) == BATCH or chars >= BATCH_CHARS:
            yield batch
            batch = []
            chars = 0
    if batch:
        yield batch


def documents_of(rows: Iterable[Document | Drop]) -> Iterator[Document]:
    """Yield the documents."""
    return (row for row in rows if isinstance(row, Document))


def split(document: Document, max_chars: int | None) -> Iterator[Document]:
    """Cut a document into pieces of whole lines of at most `max_chars` characters.

    For sequences much shorter than a file: a piece that fits a sequence can be laid out
    for infilling (Bavarian et al. 2022, context-level FIM). A piece of at least half the
    size ends before a function or a paragraph, if one begins there. A longer line is a
    piece of its own. The pieces' texts concatenate to the document's. None cuts nothing.

    The pieces of a conversation are its answers, each with all messages before it.
    """
    if document.messages:
        for index, turn in enumerate(document.turns):
            messages = document.messages[: turn.message + 1]
            yield replace(
                document,
                id=f"{document.id}#{index}" if document.turns[1:] else document.id,
                text=text_of(messages),
                messages=messages,
                turns=(turn,),
            )
        return
    if max_chars is None:
        yield document
        return
    lines = document.text.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]
    texts = [] if lines else [""]
    first = 0
    while first < len(lines):
        size = starts[first] + max_chars
        full = max(first + 1, bisect_right(starts, size) - 1)
        half = max(first + 1, bisect_left(starts, size - max_chars // 2))
        last = full if full == len(lines) else _outermost(lines, half, full)
        texts.append("".join(lines[first:last]))
        first = last
    for index, text in enumerate(texts):
        ends = document.ends and index == len(texts) - 1
        yield replace(document, id=f"{document.id}#{index}", text=text, ends=ends)


def _outermost(lines: Sequence[str], start: int, stop: int) -> int:
    """Return the last of the least indented lines that follow a blank one, else `stop`."""
    opening = [
        index
        for index in range(start, stop + 1)
        if lines[index - 1].isspace() and not lines[index].isspace()
    ]

    def indent(index: int) -> int:
        return len(lines[index]) - len(lines[index].lstrip())

    return min(reversed(opening), key=indent, default=stop)
