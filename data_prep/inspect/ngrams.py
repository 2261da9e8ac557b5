"""How the n-gram table goes on after the data's most frequent tokens."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.text import Text
from safetensors.numpy import load_file

from conf.characters import pictures
from data_prep.encode.encoder import Encoder
from data_prep.inspect.show import HEADING
from data_prep.ngrams import hash_contexts

STARTS = 3  # tokens that are shown
LENGTH = 12  # tokens that follow each of them, at most


def continuation_lines(path: Path, order: int, encoder: Encoder) -> Iterator[Text]:
    """Yield, for each of the most frequent tokens that have a context, the likeliest text after it."""
    table = load_file(path)
    ids = np.arange(len(table["unigrams"]))
    known = ids[np.isin(hash_contexts([ids]), table["keys_2"])] if order > 1 else ids[:0]
    for start in known[np.argsort(-table["unigrams"][known].astype(np.int64))][:STARTS].tolist():
        text = continue_text(table, order, [start])
        before, after = (pictures(encoder.decode(np.array(part))) for part in (text[:1], text[1:]))
        yield Text.assemble("after ", (repr(before), HEADING), ": ", repr(after))


def continue_text(table: dict[str, np.ndarray], order: int, text: list[int]) -> list[int]:
    """Return the ids and up to LENGTH more, each the likeliest after the longest context that the table has."""
    for _ in range(LENGTH):
        successor = None
        for level in range(2, min(order, len(text) + 1) + 1):
            key = hash_contexts([np.array([id]) for id in text[:-level:-1]])
            place = np.searchsorted(table[f"keys_{level}"], key)[0]
            if place < len(table[f"keys_{level}"]) and table[f"keys_{level}"][place] == key[0]:
                successor = int(table[f"ids_{level}"][table[f"first_{level}"][place]])
        if successor is None:
            break
        text = [*text, successor]
    return text
