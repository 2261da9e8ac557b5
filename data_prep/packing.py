"""Documents into sequences of one length. Pure: token lists in, sequences out.

An infilling document is never cut; a plain one may be, at the end of a sequence. A chat
document is cut only if it is longer than a sequence. Every sequence knows the spans of
its documents, so what is not covered by a span is padding.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from data_prep.encode import Mode


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document in token ids."""

    id: str
    language: int  # index into a list of languages
    mode: Mode
    ids: np.ndarray  # (n,)
    prompt: int = 0  # leading ids that have no loss


@dataclass(frozen=True, slots=True)
class Span:
    """A document, or the part of one, at tokens start:stop of a sequence."""

    start: int
    stop: int
    document: Encoded
    offset: int  # of the part within the document


@dataclass(slots=True)
class SequenceSpans:
    """One sequence: spans in order, without gaps from 0."""

    spans: list[Span] = field(default_factory=list)

    @property
    def used(self) -> int:
        """Tokens that are filled; the rest is padding."""
        return self.spans[-1].stop if self.spans else 0

    def place(self, document: Encoded, offset: int, length: int) -> None:
        """Append `length` tokens of a document from `offset` on."""
        self.spans.append(Span(self.used, self.used + length, document, offset))

    def tokens(self, seq_len: int, padding: int) -> np.ndarray:
        """Return (seq_len,) ids, `padding` after the last document."""
        parts = [
            span.document.ids[span.offset :][: span.stop - span.start]
            for span in self.spans
        ]
        return np.concatenate([*parts, np.full(seq_len - self.used, padding)])


def pack(
    documents: Iterable[Encoded], seq_len: int, *, patience: int = 64
) -> Iterator[SequenceSpans]:
    """Fill sequences of `seq_len` tokens.

    An infilling document that does not fit the open sequence waits for the next one while
    plain documents fill the gap; once `patience` documents wait, the gap is padded instead.
    Raises ValueError for an infilling document longer than a sequence.
    """
    current = SequenceSpans()
    waiting: deque[Encoded] = deque()
    for document in documents:
        long_chat = document.mode is Mode.CHAT and len(document.ids) > seq_len
        if document.mode is not Mode.PLAIN and not long_chat:
            if len(document.ids) > seq_len:
                raise ValueError(
                    f"an infilling document of {len(document.ids)} tokens cannot be cut"
                )
            waiting.append(document)
            _place_waiting(current, waiting, seq_len)
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
            current.place(document, offset, length)
            offset += length
    while current.spans:
        yield current
        current = _open(waiting, seq_len)


def _open(waiting: deque[Encoded], seq_len: int) -> SequenceSpans:
    """Begin a sequence with the waiting documents, which cannot be cut."""
    opened = SequenceSpans()
    _place_waiting(opened, waiting, seq_len)
    return opened


def _place_waiting(
    current: SequenceSpans, waiting: deque[Encoded], seq_len: int
) -> None:
    """Place, in order of arrival, every waiting document that fits."""
    for _ in range(len(waiting)):
        document = waiting.popleft()
        if len(document.ids) <= seq_len - current.used:
            current.place(document, 0, len(document.ids))
        else:
            waiting.append(document)
