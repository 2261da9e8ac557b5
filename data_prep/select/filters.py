"""Which documents are worth training on. Pure: a document in, a reason to drop it out.

The limits are those of The Stack (Kocetkov et al. 2022, §3) and StarCoder (Li et al. 2023, §3.1).
"""

import string

from data_prep.config import FilterConfig
from data_prep.document import Document

ALPHANUMERIC = (string.ascii_letters + string.digits).encode()


def reason_to_drop(document: Document, config: FilterConfig) -> str | None:
    """The first limit that the document breaks; None for a good one."""
    text = document.text
    if not text or text.isspace():
        return "empty"
    if "\0" in text:
        return "NUL bytes"
    if document.language not in config.long_lines:
        if config.mean_line is not None and len(text) > config.mean_line * (text.count("\n") + 1):
            return "mean line too long"
        if config.longest_line is not None and longest_line(text) > config.longest_line:
            return "line too long"
    if config.alphanumeric is not None and not is_alphanumeric(text, config.alphanumeric):
        return "too few alphanumerics"
    return None


def longest_line(text: str) -> int:
    """Characters of the longest line."""
    return max(map(len, text.split("\n")))


def is_alphanumeric(text: str, least: float) -> bool:
    """Whether at least this share of the characters are letters or digits, of any script."""
    data = text.encode("utf-8", "surrogatepass")
    ascii_count = len(data) - len(data.translate(None, ALPHANUMERIC))
    # Counting ASCII is fifty times as fast, and enough for nearly every source file.
    return ascii_count >= least * len(text) or sum(map(str.isalnum, text)) >= least * len(text)
