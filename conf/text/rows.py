"""Read rows from JSON lines, JSON lists, indented JSON, CSV, TSV and parquet; also .gz, .bz2, .xz, .zst."""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

ROW_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
# The first line of a JSON list or of an indented object. A line such as [1] is a malformed row of JSON lines.
SEVERAL_LINES = re.compile(rb"\[\s*(\{|\]|$)|\{\s*$")
CHUNK = 2**20  # characters to read at once


def _open_zst(stream: Any) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(stream, "zstd")


DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zst,
}


def form_of(name: str) -> str:
    """Return the suffix of a file's format in lower case: ".jsonl" for a.jsonl.gz and A.JSONL."""
    return without_compression(Path(name)).suffix.lower()


def without_compression(path: Path) -> Path:
    """Return a path without the suffix of a compression."""
    return path.with_suffix("") if decompressor_of(path) else path


def decompressor_of(path: Path) -> Callable[[Any], Any] | None:
    """Return the function that opens the stream of a compressed file, None for other files."""
    return DECOMPRESSORS.get(path.suffix.lower())


def spans_lines(start: bytes) -> bool:
    """Return True if a JSON file that begins like this is a list or indented objects, not JSON lines."""
    first_line = start.lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")[0]
    return bool(SEVERAL_LINES.match(first_line))


def json_values(stream: TextIO, limit: int) -> Iterator[Any]:
    """Yield the members of a JSON list, or concatenated JSON values, of at most about `limit` characters each.

    Raises ValueError or RecursionError at invalid JSON; the rest of the text cannot be read.
    """
    decoder = json.JSONDecoder()
    separators = re.compile(r"[\s,]*")
    buffer = stream.read(CHUNK)
    at = len(buffer) - len(buffer.lstrip("\ufeff \t\r\n"))
    listed = buffer.startswith("[", at)
    at += listed
    needed = CHUNK
    while True:
        at = separators.match(buffer, at).end()  # type: ignore[union-attr]
        ended = len(buffer) - at < needed and not (more := stream.read(needed))
        if not ended and len(buffer) - at < needed:
            buffer, at = buffer[at:] + more, 0
            continue
        if at == len(buffer) or (listed and buffer[at] == "]"):
            if listed and buffer[at:].strip() != "]":
                raise ValueError("the list does not end")
            return
        try:
            value, at = decoder.raw_decode(buffer, at)
        except ValueError:
            if ended:
                raise
            if needed > limit:
                raise ValueError(
                    f"invalid JSON, or a value of more than {limit} characters"
                ) from None
            needed *= 2  # the value may continue beyond the buffer
            continue
        needed = CHUNK
        yield value


def read_rows(path: Path, bad: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file.

    Malformed lines of JSON lines are appended to `bad` as "line N: reason". Without `bad`, they raise
    ValueError or TypeError. Other bytes than UTF-8 in a list or in CSV become lone surrogates.
    """
    if form_of(path.name) == ".parquet":
        from pyarrow.parquet import read_table

        return list(map(without_null, read_table(path).to_pylist()))
    with open(path, "rb") as raw:
        decompress = decompressor_of(path)
        content = (decompress(raw) if decompress else raw).read()
    text = content.decode("utf-8-sig", errors="surrogateescape")
    if form_of(path.name) in (".csv", ".tsv"):
        rows_of_csv = read_csv(io.StringIO(text, newline=""), path.name)
        try:
            return list(rows_of_csv)
        except csv.Error as error:
            raise ValueError(f"line {rows_of_csv.line_num}: {error}") from error
    if spans_lines(content[:CHUNK]):
        return list(map(_object, json_values(io.StringIO(text), len(text))))
    rows = []
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            if line.strip():
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                rows.append(_object(json.loads(text)))
        except (ValueError, TypeError, RecursionError) as error:
            if bad is None:
                raise
            bad.append(f"line {number}: {error}")
    return rows


def without_null(value: Any) -> Any:
    """Return a JSON value without the null entries that parquet adds for absent keys."""
    if isinstance(value, Mapping):
        return {k: without_null(v) for k, v in value.items() if v is not None}
    return list(map(without_null, value)) if isinstance(value, list) else value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"a row must be a JSON object, got {type(value).__name__}")
    return value


def read_csv(lines: Iterable[str], name: str) -> "csv.DictReader[str]":
    """Return a reader that yields each row of a CSV or TSV file as a dict, keyed by the first line.

    It raises csv.Error for wrong quotes, which would otherwise make one row of many lines.
    """
    delimiter = "\t" if form_of(name) == ".tsv" else ","
    return csv.DictReader(lines, delimiter=delimiter, strict=True)
