"""Tokenizing by words that were seen before: exact, and several times as fast. Knows no tokenizer.

A BPE without a pre-tokenizer (CodeLlama's) merges over whole documents, yet no merge can
cross a place that no piece of the vocabulary spans. No piece of CodeLlama's has a space
after anything else, or a line end. So a text falls into words, spaces and what follows
them, that are encoded apart; most words of source code have been seen before.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np

WORD = re.compile(r" *[^ \n]+| +|\n")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # pieces for single bytes: no merge makes them
CACHE_CHARS = 32_000_000  # in the cached words, of which each counts WORD_CHARS more for its entry
WORD_CHARS = 24

Ragged = tuple[np.ndarray, np.ndarray]  # ids of many texts, end to end, and how many each has


def falls_into_words(pieces: Iterable[str]) -> bool:
    """Whether texts of a vocabulary (with "▁" as a space) encode word by word to the same ids."""
    spelled = (piece.replace("▁", " ") for piece in pieces if not BYTE.fullmatch(piece))
    return all(len(WORD.findall(text)) <= 1 for text in spelled)


class WordCache:
    """Encodes texts word by word; `encode` is asked for the words that are new."""

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode
        self._forget()

    def _forget(self) -> None:
        self._index = _Index(self._encode)
        self._ids = np.empty(0, dtype=np.int32)
        self._starts = np.empty(0, dtype=np.int64)
        self._lengths = np.empty(0, dtype=np.int64)

    def __call__(self, texts: Sequence[str]) -> Ragged:
        """The ids of many texts."""
        if self._index.chars > CACHE_CHARS:
            self._forget()
        words = [WORD.findall(text) for text in texts]
        count = sum(map(len, words))
        index = np.fromiter(map(self._index.__getitem__, chain.from_iterable(words)), np.int64, count)
        self._take_new()
        lengths = self._lengths[index]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        places = np.arange(ends[-1]) + np.repeat(self._starts[index] - ends[:-1], lengths)
        per_text = np.cumsum([0, *map(len, words)])
        return self._ids[places], np.diff(ends[per_text])

    def _take_new(self) -> None:
        """Append the ids of the words that the index has met for the first time."""
        new, self._index.new = self._index.new, []
        if new:
            lengths = np.fromiter(map(len, new), np.int64, len(new))
            ids = np.fromiter(chain.from_iterable(new), np.int32, lengths.sum())
            self._starts = np.concatenate([self._starts, len(self._ids) + np.cumsum(lengths) - lengths])
            self._lengths = np.concatenate([self._lengths, lengths])
            self._ids = np.concatenate([self._ids, ids])


class _Index(dict[str, int]):
    """Words by number; a word that is looked up for the first time is encoded and gets the next one."""

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self._encode = encode
        self.new: list[Sequence[int]] = []
        self.chars = 0

    def __missing__(self, word: str) -> int:
        self.new.append(self._encode(word))
        self.chars += len(word) + WORD_CHARS
        self[word] = number = len(self)
        return number
