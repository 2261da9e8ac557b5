"""Whether a document holds a benchmark's task, by exact strings and by word 13-grams. Pure.

Everything is compared as a stream of words, [a-z0-9_]+ in lower case with one space
between, so that case, indentation, punctuation and comment signs do not hide a copy:

    text     # Return  length of (the) STRING.
    stream   " return length of the string "

A benchmark's text of 13 words or more is found by any 13 of them in a row (Brown et al.
2020, App. C, as used for StarCoder); a shorter one, whole, by an Aho-Corasick automaton.
13-grams of numbers and single letters alone are ignored, and so are texts of fewer than 5 words, and
13-grams that many tasks of one benchmark share: the imports before each of MultiPL-E's C# and Java tasks
stand at the head of ordinary files too.
"""

import string
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from ahocorasick_rs import BytesAhoCorasick

NGRAM = 13
LEAST_WORDS = 5
SHARED = 30  # tasks of one file, of which MultiPL-E has one for each language: translations do not add up
BORDER = b"\x01"  # between documents; no word of any text holds it
WORD_BYTES = (string.ascii_lowercase + string.digits + "_").encode()
LOWER = bytes(
    code if code in WORD_BYTES else code + 32 if chr(code) in string.ascii_uppercase else 32
    for code in range(256)
)
BASE = 2654435761  # of the rolling hash; odd, so that it has an inverse modulo 2**32


@dataclass(frozen=True, slots=True)
class Match:
    """A benchmark's task, and the words of it that a document holds."""

    task: str
    words: str


def word_stream(texts: Sequence[str]) -> bytes:
    """The texts' words, each with one space before and after, a border before each text."""
    lowered = (BORDER + b" " + text.encode("utf-8", "surrogatepass").translate(LOWER) for text in texts)
    data = np.frombuffer(b" " + b" ".join(lowered) + b" ", dtype=np.uint8)
    is_word = data != 32
    keep = is_word.copy()
    keep[0] = True
    keep[1:] |= is_word[:-1]
    return data[keep].tobytes()


def index_entries(entries: Iterable[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """What an Index searches for, from (task, text): {"ngrams": {words: task}, "strings": {words: task}}.

    Of equal words the first task is named. A task is called "source/name"; a text whose 13-grams are all shared
    by SHARED tasks of its source keeps them.
    """
    ngrams: dict[str, str] = {}
    strings: dict[str, str] = {}
    texts = [(task, word_stream([text]).decode().split()[1:]) for task, text in entries]
    boilerplate = _boilerplate(texts)
    for task, words in texts:
        if LEAST_WORDS <= len(words) < NGRAM:
            strings.setdefault(" ".join(words), task)
        grams = _ngrams(words)
        for ngram in [ngram for ngram in grams if ngram not in boilerplate] or grams:
            ngrams.setdefault(ngram, task)
    return {"ngrams": ngrams, "strings": strings}


def _ngrams(words: list[str]) -> list[str]:
    """All 13 words in a row that say something."""
    windows = (words[start : start + NGRAM] for start in range(len(words) - NGRAM + 1))
    return [
        " ".join(window) for window in windows if not all(len(word) == 1 or word.isdigit() for word in window)
    ]


def _boilerplate(texts: Iterable[tuple[str, list[str]]]) -> set[str]:
    """The 13-grams that SHARED tasks of one source have."""
    by_task: defaultdict[str, set[str]] = defaultdict(set)
    for task, words in texts:
        by_task[task].update(_ngrams(words))
    counts: Counter[tuple[str, str]] = Counter()
    for task, grams in by_task.items():
        counts.update((task.rpartition("/")[0], ngram) for ngram in grams)
    return {ngram for (_, ngram), tasks in counts.items() if tasks >= SHARED}


class Index:
    """The words of benchmarks, prepared for search."""

    def __init__(self, ngrams: Mapping[str, str], strings: Mapping[str, str]) -> None:
        self._ngrams = {words.encode(): task for words, task in ngrams.items()}
        self._strings = [(words, task) for words, task in strings.items()]
        patterns = [f" {words} ".encode() for words in strings]
        self._automaton = BytesAhoCorasick(patterns) if patterns else None
        joined = np.frombuffer(b" ".join([b"", *self._ngrams, b""]), dtype=np.uint8)
        spaces = np.flatnonzero(joined == 32)
        hashes = _hashes(joined, spaces[:-1:NGRAM], spaces[NGRAM::NGRAM])
        self._may_hold = np.zeros(2**22, dtype=bool)  # by the top bits of the hash
        self._may_hold[hashes >> 10] = True

    def search(self, texts: Sequence[str]) -> list[Match | None]:
        """For each text the first match of a 13-gram, or else of a short text."""
        matches: list[Match | None] = [None] * len(texts)
        if not texts or not (self._ngrams or self._strings):
            return matches
        stream = word_stream(texts)
        data = np.frombuffer(stream, dtype=np.uint8)
        borders = np.flatnonzero(data == BORDER[0])
        hits = [*self._ngram_hits(stream, data), *self._string_hits(stream)]
        for place, match in hits:
            text = int(np.searchsorted(borders, place, side="right")) - 1
            matches[text] = matches[text] or match
        return matches

    def _ngram_hits(self, stream: bytes, data: np.ndarray) -> Iterable[tuple[int, Match]]:
        """Windows whose hash is known, then compared in full: a collision drops nothing."""
        spaces = np.flatnonzero(data == 32)
        starts, stops = spaces[:-NGRAM], spaces[NGRAM:]
        if not self._ngrams or not len(starts):
            return
        hashes = _hashes(data, starts, stops)
        for window in np.flatnonzero(self._may_hold[hashes >> 10]):
            words = stream[starts[window] + 1 : stops[window]]
            if (task := self._ngrams.get(words)) is not None:
                yield int(starts[window]) + 1, Match(task, words.decode())

    def _string_hits(self, stream: bytes) -> Iterable[tuple[int, Match]]:
        if self._automaton is None:
            return
        for pattern, start, _ in self._automaton.find_matches_as_indexes(stream):
            words, task = self._strings[pattern]
            yield start + 1, Match(task, words)


def _hashes(data: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Polynomial hashes modulo 2**32 of data[start + 1 : stop], from one cumulative sum.

    sum(data[i] * BASE**i) over the window, divided by BASE**(start + 1).
    """
    powers, inverses = _powers((len(data) + 1).bit_length())
    prefix = np.cumsum(data * powers[: len(data)], dtype=np.uint32)
    return (prefix[stops - 1] - prefix[starts]) * inverses[starts + 1]


@lru_cache
def _powers(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(2**bits,) powers of BASE and of its inverse, modulo 2**32."""
    factors = [np.full(2**bits, base, dtype=np.uint32) for base in (BASE, pow(BASE, -1, 2**32))]
    for values in factors:
        values[0] = 1
    powers, inverses = (np.cumprod(values, dtype=np.uint32) for values in factors)
    return powers, inverses
