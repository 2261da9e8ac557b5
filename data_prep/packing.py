"""Pack documents into sequences of equal length. Pure functions, without files.

Infilling documents are never cut. A plain document may be cut at the end of a sequence. A
chat document is cut only if it is longer than a sequence. A sequence has the spans of its
documents; tokens outside of all spans are padding.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from data_prep.encode import Mode


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document as token ids, with its id, language and layout."""

    id: str
    language: int  # index into a list of languages
    mode: Mode
    ids: np.ndarray  # (n,)
    prompt: int = 0  # number of leading ids without loss


@dataclass(frozen=True, slots=True)
class Span:
    """A document, or a part of a document, at tokens start:stop of a sequence."""

    start: int
    stop: int
    document: Encoded
    offset: int  # start of the part within the document


@dataclass(slots=True)
class SequenceSpans:
    """The spans of a sequence in order, from token 0 without gaps."""

    spans: list[Span] = field(default_factory=list)

    @property
    def used(self) -> int:
        """The number of tokens before the padding."""
        return self.spans[-1].stop if self.spans else 0

    def append(self, document: Encoded, offset: int, length: int) -> None:
        """Append `length` tokens of a document, starting at `offset`."""
        self.spans.append(Span(self.used, self.used + length, document, offset))

    def tokens(self, seq_len: int, padding: int) -> np.ndarray:
        """Return the (seq_len,) ids, with the id `padding` after the last document."""
        parts = [
            span.document.ids[span.offset :][: span.stop - span.start]
            for span in self.spans
        ]
        return np.concatenate([*parts, np.full(seq_len - self.used, padding)])


def pack(
    documents: Iterable[Encoded], seq_len: int, *, patience: int = 64
) -> Iterator[SequenceSpans]:
    """Pack documents into sequences of `seq_len` tokens.

    An infilling document that does not fit in the current sequence waits for the next one,
    while plain documents fill the gap. If more than `patience` documents wait, the gap is
    padded instead. Raises ValueError for an infilling document longer than a sequence.
    """
    current = SequenceSpans()
    waiting: deque[Encoded] = deque()
    for document in documents:
        long_chat = document.mode is Mode.CHAT and len(document.ids) > seq_len
        if document.mode is not Mode.PLAIN and not long_chat:
            if len(document.ids) > seq_len:
                raise ValueError(
                    f"an infilling document must have at most {seq_len} tokens, got "
                    f"{len(document.ids)}"
                )
            waiting.append(document)
            _append_waiting(current, waiting, seq_len)
            while len(waiting) > patience:
                yield current
                current = _open(waiting, seq_len)
            continue
        offset = 0
        while offset < len(document.ids):
            length = min(len(document.ids) - offset, seq_len - current.used)
            if length == 0:
                yield current
                current = _open(waiting, seq_len)
                continue
            current.append(document, offset, length)
            offset += length
    while current.spans:
        yield current
        current = _open(waiting, seq_len)


def _open(waiting: deque[Encoded], seq_len: int) -> SequenceSpans:
    """Start a new sequence with the waiting documents that fit."""
    sequence = SequenceSpans()
    _append_waiting(sequence, waiting, seq_len)
    return sequence


def _append_waiting(
    current: SequenceSpans, waiting: deque[Encoded], seq_len: int
) -> None:
    """Append each waiting document that fits, in order of arrival."""
    for _ in range(len(waiting)):
        document = waiting.popleft()
        if len(document.ids) <= seq_len - current.used:
            current.append(document, 0, len(document.ids))
        else:
            waiting.append(document)
