"""Documents, drops, and random decisions about documents.

Every random decision is a hash of the seed and the document's id or text, so the output does not
depend on the number of workers or their order.
"""

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any, NamedTuple, TypeVar

import numpy as np

from conf.text.conversations import Message, text_of


class Turn(NamedTuple):
    """An answer of a conversation with its prompt, encoded by the chat template."""

    message: int  # index of the answer among the messages
    prompt: int  # number of leading ids that belong to the prompt
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Document:
    """A source file, a conversation, or a piece of one.

    `file` and `row` are its source. `held_out` documents are never trained on. `ends` is
    False if no EOS or end of turn follows: for all pieces of a file but the last, and for a
    conversation with a truncated last answer. For a conversation, `text` is the reasoning,
    contents and tool calls of its `messages`, and `turns` are its answers after
    data_prep.chat has encoded them.
    """

    id: str
    text: str
    language: str
    file: str = ""
    row: int = 0
    held_out: bool = False
    ends: bool = True
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()  # declared tools, for the chat template
    turns: tuple[Turn, ...] = ()

    def drop(self, reason: str, detail: str = "") -> "Drop":
        """Return a Drop that says why this document is left out."""
        return Drop(reason, self.file, self.row, self.id, detail)


DROPS = "drops.jsonl"  # the file of drops in a data folder
NOT_READ = "rest of a file"  # the reason if invalid JSON hides the next row of a list


@dataclass(frozen=True, slots=True)
class Drop:
    """A row that is left out: the reason and the source."""

    reason: str
    file: str
    row: int | None = None  # None for the whole file
    id: str = ""
    detail: str = ""


R = TypeVar("R", bound="Document | Drop")
BATCH = 256  # largest number of rows in a batch
BATCH_CHARS = 1_000_000  # characters that close a batch


def format_counts(drops: Counter[str]) -> str:
    """Format drops by reason for an error message, the most frequent first."""
    return (
        ", ".join(f"{count} {reason}" for reason, count in drops.most_common())
        or "none"
    )


def hash64(*names: object) -> int:
    """Return a 64-bit hash of the names, the same on every machine."""
    joined = "\x1f".join(map(str, names)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")


def uniform_hash(*names: object) -> float:
    """Return a hash of the names that is uniform in [0, 1), the same on every machine."""
    return (hash64(*names) >> 11) / 2**53


def generator(*names: object) -> np.random.Generator:
    """Return a random generator with a seed that is a hash of the names."""
    return np.random.Generator(np.random.PCG64(hash64(*names)))


def held_out_number(document: Document, *, seed: int) -> float:
    """Return a number in [0, 1); the document is held out if it is below the share.

    Equal texts have the same number, and conversations with the same messages before the first
    answer. So no copy of a held-out text is trained on.
    """
    prompt = takewhile(lambda m: m["role"] != "assistant", document.messages)
    key = json.dumps(list(prompt)) if document.messages else document.text
    return uniform_hash(seed, "held_out", key)


def held_out_share(numbers: Iterable[float], *, share: float, least: int) -> float:
    """Return `share`, raised to hold out at least `least` different texts, but at most a fifth of them."""
    distinct = sorted(set(numbers))
    least = min(least, len(distinct) // 5) if share else 0
    return max(share, math.nextafter(distinct[least - 1], 1.0)) if least else share


def order(id: str, *, seed: int) -> int:
    """Return a document's sort key: a hash, so that the order of documents is random."""
    return hash64(seed, "order", id)


def batches(rows: Iterable[R]) -> Iterator[list[R]]:
    """Yield the rows in batches of bounded size, in order."""
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
    """Yield only the documents of the rows."""
    return (row for row in rows if isinstance(row, Document))


def split(document: Document, max_chars: int | None) -> Iterator[Document]:
    """Cut a document into pieces of whole lines with at most `max_chars` characters.

    Use it if sequences are much shorter than files: a piece that fits a sequence can be laid
    out for infilling (Bavarian et al. 2022, context-level FIM). In the second half of its size
    a piece ends before a function or a paragraph if possible. A line longer than `max_chars`
    is a separate piece. The texts of the pieces concatenate to the document's text.
    `max_chars=None` cuts nothing.

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
    """Return the last of the least indented lines after a blank line in start:stop + 1, else `stop`."""
    candidates = [
        index
        for index in range(start, stop + 1)
        if lines[index - 1].isspace() and not lines[index].isspace()
    ]

    def indent(index: int) -> int:
        return len(lines[index]) - len(lines[index].lstrip())

    return min(reversed(candidates), key=indent, default=stop)
