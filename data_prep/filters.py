"""Which documents are worth training on: filters, then decontamination. Counts nothing.

The limits are those of The Stack (Kocetkov et al. 2022, §3) and StarCoder (Li et al. 2023, §3.1).
"""

import string
from collections.abc import Iterable, Iterator

from data_prep.config import FilterConfig
from data_prep.decontaminate import Index
from data_prep.document import Document, Drop, batches
from data_prep.encode import Encoder

ALPHANUMERIC = (string.ascii_letters + string.digits).encode()


def screen(
    rows: Iterable[Document | Drop], config: FilterConfig, encoder: Encoder, index: Index
) -> Iterator[Document | Drop]:
    """Yield the same rows in the same order, with a Drop for each document that fails."""
    for batch in batches(rows):
        checked = [_filter(row, config, encoder) if isinstance(row, Document) else row for row in batch]
        texts = [row.text for row in checked if isinstance(row, Document)]
        matches = iter(index.search(texts))
        for row in checked:
            if isinstance(row, Document) and (match := next(matches)):
                yield row.drop("contaminated", f"{match.task}: {match.words}")
            else:
                yield row


def _filter(document: Document, config: FilterConfig, encoder: Encoder) -> Document | Drop:
    reason = reason_to_drop(document, config)
    if not reason and config.control == "drop" and encoder.spells_control(document.text):
        reason = "control pieces"
    return document.drop(reason) if reason else document


def reason_to_drop(document: Document, config: FilterConfig) -> str | None:
    """Return the first limit that the document breaks; None for a good one."""
    text = document.text
    if not text or text.isspace():
        return "empty"
    if "\0" in text:
        return "NUL bytes"
    if document.language not in config.long_lines:
        if config.mean_line is not None and len(text) > config.mean_line * (text.count("\n") + 1):
            return "mean line too long"
        if config.longest_line is not None and max(map(len, text.split("\n"))) > config.longest_line:
            return "line too long"
    if config.alphanumeric is not None and not is_alphanumeric(text, config.alphanumeric):
        return "too few alphanumerics"
    return None


def is_alphanumeric(text: str, least: float) -> bool:
    """Return whether at least this share of the characters are letters or digits, of any script."""
    data = text.encode("utf-8", "surrogatepass")
    ascii_count = len(data) - len(data.translate(None, ALPHANUMERIC))
    # Counting ASCII is fifty times as fast, and enough for nearly every source file.
    return ascii_count >= least * len(text) or sum(map(str.isalnum, text)) >= least * len(text)
