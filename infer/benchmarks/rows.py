"""Rows of files (JSON lines, a JSON list, or parquet, compressed or not) and of the hub's datasets.

Each row knows where it stands; the hub, or its cache on this machine, answers within a bounded time. A row
becomes a Problem: what the model is given, where its answer ends, and how that is judged.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conf import UserError
from conf.errors import HUB
from infer.config import Infill
from infer.sandbox import Program

SUFFIXES = (".jsonl", ".json", ".parquet")
PACKED = (".gz", ".zst")


@dataclass(frozen=True, slots=True)
class SourceRow:
    """An object of a file. Raises UserError, naming file and line, for a field that is not there."""

    values: Mapping[str, Any]
    source: str  # the file's name without its endings, or the dataset's configuration
    place: str  # "FILE, line 3"
    number: int  # from 1 on

    def text(self, *names: str) -> str:
        """Return the text of the first of these fields that is there."""
        for name in names:
            if isinstance(value := self.values.get(name), str):
                return self._checked(name, value)
        raise self.lacks(f"a text '{names[0]}'", *names)

    def maybe(self, name: str) -> str | None:
        """Return the text of a field that need not be there, or may be null."""
        return self.text(name) if self.values.get(name) is not None else None

    def texts(self, name: str) -> list[str]:
        """Return the field's list of texts."""
        value = self.values.get(name)
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            return [self._checked(name, text) for text in value]
        raise self.lacks(f"a list of texts '{name}'", name)

    def whole(self, name: str) -> int:
        """Return the field's whole number."""
        value = self.values.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self.lacks(f"a whole number '{name}'", name)

    def _checked(self, name: str, text: str) -> str:
        if half := re.search("[\ud800-\udfff]", text):
            raise UserError(
                f"{self.place}: '{name}' must be text that UTF-8 can hold, got half of a surrogate pair, "
                f"{half[0]!r}. Correct or remove the row"
            )
        return text

    def lacks(self, needed: str, *names: str) -> UserError:
        """Return the error for a row whose fields `names` are not the `needed` ones."""
        given = [f"{name}={self.values[name]!r:.60}" for name in names if self.values.get(name) is not None]
        fields = " ".join(given) or f"the fields {', '.join(self.values) or 'of nothing'}"
        return UserError(f"{self.place} must be JSON with {needed}, got {fields}")


def rows_of(path: Path) -> list[SourceRow]:
    """Read all rows of a file. Raises UserError for a file that cannot be read, and for a malformed row."""
    source = path.name.split(".")[0]
    try:
        if path.suffix == ".parquet":
            return placed(pq.read_table(path).to_pylist(), source, f"{path}, row ")
        if path.suffix in PACKED and not path.stat().st_size:
            raise ValueError("an archive of no bytes")  # even of no text it has a head
        with pa.input_stream(str(path), compression="detect") as stream:
            text = stream.read().decode("utf-8-sig")
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        first_line = str(error).strip().split("\n")[0][:200]
        raise UserError(f"{path} must be a readable file, got {first_line}") from error
    if text.lstrip().startswith("["):
        return placed(_parsed(text, str(path), "a JSON list"), source, f"{path}, entry ")
    place, lines = f"{path}, line ", enumerate(text.split("\n"), 1)
    return [_row(_parsed(line, f"{place}{n}", "JSON"), source, place, n) for n, line in lines if line.strip()]


def placed(values: Sequence[Any], source: str, place: str) -> list[SourceRow]:
    """Return the rows of values, numbered."""
    return [_row(value, source, place, number) for number, value in enumerate(values, 1)]


def _parsed(text: str, place: str, kind: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} must be {kind}, got {error}") from error


def _row(value: Any, source: str, place: str, number: int) -> SourceRow:
    if not isinstance(value, dict):
        raise UserError(f"{place}{number} must be a JSON object, got {type(value).__name__}")
    return SourceRow(value, source, f"{place}{number}", number)


PATIENCE = 180  # seconds: the libraries try a dead line for half a minute and more


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset's name, one of its configurations, and its splits."""

    name: str
    configuration: str | None = None
    splits: tuple[str, ...] = ("test",)


def hub_rows(dataset: Dataset, setting: str) -> list[SourceRow]:
    """Read all rows of the splits. Raises UserError, naming the setting, where the hub does not give them."""
    answer: Any = TimeoutError(f"no answer in {PATIENCE} s")

    def load() -> None:
        nonlocal answer
        try:
            answer = _load(dataset)
        except Exception as error:  # of many libraries, all of which mean that it is not there
            answer = error

    # A daemon: when time is up it must not keep the process from ending.
    loading = Thread(target=load, daemon=True)
    loading.start()
    loading.join(PATIENCE)
    if isinstance(answer, Exception):
        reason = f"{type(answer).__name__}: {str(answer).strip()}".split("\n")[0][:160]
        raise UserError(
            f"{setting}.path: the dataset {dataset.name} must come from the hub, got {reason}. Give a file as "
            f"{setting}.path=FILE",
            page=HUB,
        ) from answer
    name = " ".join(filter(None, (dataset.name, dataset.configuration)))
    return placed(answer, dataset.configuration or "", f"{name}, row ")


def _load(dataset: Dataset) -> list[dict[str, Any]]:
    from datasets import load_dataset

    loaded = load_dataset(dataset.name, dataset.configuration)
    return [row for split in dataset.splits for row in loaded[split]]


def by_row(
    problem: Callable[[SourceRow, Any], "Problem"],
) -> Callable[[Sequence[SourceRow], Any], list["Problem"]]:
    """Return a function of one row and the settings as one of all rows."""
    return lambda rows, config: [problem(row, config) for row in rows]


@dataclass(frozen=True, slots=True)
class Problem:
    """`prompt` is what the model is given, `answer` the authors' own: a solution, or the missing text."""

    id: str  # unique within benchmark and language
    prompt: str | Infill
    stop: tuple[str, ...] = ()  # texts that end the answer and are no part of it
    answer: str | None = None
    language: str = ""  # "python", "cpp", ...; of infilling too
    category: str = ""  # Spec-Bench's
    head: str | None = None  # what stands before the answer in the program; None: the prompt
    tests: str = ""  # that call the program; none where nothing is executed
    known: str = ""  # Python: names that the tests may use beside the program's

    def cut(self, completion: str) -> str:
        """Return the completion up to the first of the texts that end it."""
        places = [place for text in self.stop if (place := completion.find(text)) >= 0]
        return completion[: min(places, default=len(completion))]

    def program(self, completion: str) -> Program | None:
        """Return what is executed to judge a completion; None where nothing is."""
        head = self.prompt if self.head is None else self.head
        program = Program(self.language, f"{head}{self.cut(completion)}\n", self.tests, self.known)
        return program if self.tests else None

    def matches(self, completion: str) -> bool:
        """Return whether the completion is the authors' answer, but for white space at either end."""
        return self.answer is not None and self.cut(completion).strip() == self.answer.strip()
