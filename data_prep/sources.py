"""Read documents from source files or files of rows.

The file's suffix decides the format: JSON lines, a JSON list, indented JSON, CSV, TSV or
parquet. `datasets` reads parquet. JSON lines are read here, because the reader "json" of
`datasets` stops at the first malformed line, and "text" needs seven times a line's size in
memory. A row or file that cannot be read becomes a Drop. StarCoder's metadata line is removed;
other filters on content are in data_prep.filters.
"""

import csv
import glob
import gzip
import io
import json
import logging
import lzma
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from conf.errors import MEMORY, UserError, describe_error, in_one_line
from conf.text.conversations import (
    COLUMNS,
    CONTEXT_COLUMNS,
    Message,
    NoConversation,
    conversation,
    text_of,
    tools_of,
)
from conf.text.rows import (
    ROW_FILES,
    decompressor_of,
    form_of,
    json_values,
    read_csv,
    spans_lines,
    without_null,
)
from data_prep.config import DataConfig
from data_prep.document import NOT_READ, Document, Drop
from data_prep.listing import REMOTE, InputPart

METADATA = re.compile(r"\A<(?:reponame|filename|gh_stars)>[^\n]*\n")
BINARY_BYTES = (
    8000  # a file with a NUL in its first bytes is binary, the same rule as in git
)
BATCH_ROWS = 64  # rows of parquet to decode at once
BLOCK = 2**20  # bytes of a source file to read at once
# Errors that libraries raise for damaged files.
FORMAT_ERRORS = (pa.ArrowException, ValueError, EOFError, zlib.error, lzma.LZMAError)
UNREADABLE = frozenset(
    {
        "unreadable file",
        "malformed row",
        "missing column",
        "undecodable",
        "line too large",
        "unusable conversation",
    }
)
NOT_A_FILE = "broken link or device"


def read(part: InputPart, root: str, data: DataConfig) -> Iterator[Document | Drop]:
    """Yield the rows of a part in order.

    A damaged file is read up to the damage. Raises UserError if the machine or the hub fails
    to read a file, so that it is not counted as damaged.
    """
    for name in part.special:
        yield Drop(NOT_A_FILE, name)
    for file in part.files:
        reader = _read_source if data.kind == "source" else READERS[form_of(file)]
        try:
            yield from reader(f"{root}/{file}", file, data)
        except Exception as error:
            if _is_damage(error):
                yield Drop("unreadable file", file, detail=in_one_line(error, 200))
                continue
            lacks_memory = isinstance(error, MemoryError)
            cure = "with fewer workers" if lacks_memory else "when the file is readable"
            raise UserError(
                f"{root}/{file} must be readable, got {describe_error(error)}. Rerun the "
                f"command to continue, {cure}",
                page=MEMORY if lacks_memory else None,
            ) from error


def _is_damage(error: Exception) -> bool:
    """Return True if the file is damaged, False if the system or the hub could not read it.

    Codecs raise a plain OSError without errno. Errors of the hub are subclasses of OSError, and
    some are also ValueErrors.
    """
    if isinstance(error, OSError):
        plain = type(error) in (OSError, gzip.BadGzipFile)
        return plain and error.errno is None
    return isinstance(error, FORMAT_ERRORS) and not isinstance(error, MemoryError)


def _open(path: str) -> io.BufferedReader:
    """Open a file for reading. A file on the hub is read in ranges and never stored."""
    if not path.startswith(REMOTE):
        return open(path, "rb")
    from huggingface_hub import HfFileSystem

    file = HfFileSystem().open(path.removeprefix(REMOTE), "rb")
    return io.BufferedReader(file, buffer_size=2**20)


def _read_source(path: str, file: str, data: DataConfig) -> Iterator[Document | Drop]:
    with _open(path) as stream:
        text = _read_beyond(stream, data.max_bytes)
    try:
        file.encode()
        if len(text) > data.max_bytes:
            yield Drop("too large", file, 0, file)
        elif b"\0" in text[:BINARY_BYTES]:
            yield Drop("binary", file, 0, file)
        else:
            language = Path(file).suffix.lstrip(".") or "none"
            yield Document(file, text.decode("utf-8-sig"), language, file)
    except UnicodeError as error:
        yield Drop("undecodable", file, 0, detail=str(error)[:200])


def _read_beyond(stream: IO[bytes], limit: int) -> bytes:
    """Return a stream's bytes, or more than `limit` of them.

    In blocks, because a single read would allocate `limit` bytes.
    """
    text = bytearray()
    while len(text) <= limit and (block := stream.read(BLOCK)):
        text += block
    return bytes(text)


def _read_parquet(path: str, file: str, data: DataConfig) -> Iterator[Document | Drop]:
    import datasets
    from pyarrow.dataset import ParquetFragmentScanOptions
    from pyarrow.parquet import read_schema

    # Without this, `datasets` sends a request to the hub for every file.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # Else `datasets` imports PyTorch in every worker, which takes a second and 180 MB of memory.
    datasets.config.TORCH_AVAILABLE = False
    datasets.logging.set_verbosity(logging.CRITICAL)
    with _open(path) as stream:
        present = read_schema(stream).names
    names = _columns(data)
    if missing := [name for name in names if name not in present]:
        yield Drop("missing column", file, detail=_lacking(missing, present))
        return
    if data.messages:
        optional = {data.messages, *COLUMNS, *CONTEXT_COLUMNS, "ends"}
        names += [name for name in present if name in optional and name not in names]
    rows = datasets.load_dataset(
        "parquet",
        data_files=[glob.escape(path)],  # a path with brackets is no pattern
        split="train",
        streaming=True,
        columns=names,
        batch_size=BATCH_ROWS,
        # Verify the checksums of pages that have one.
        fragment_scan_options=ParquetFragmentScanOptions(
            page_checksum_verification=True
        ),
    )
    row = 0
    for table in rows.with_format("arrow").iter(BATCH_ROWS):
        columns = [_as_bytes(table[name].combine_chunks()) for name in names]
        for values in zip(*columns, strict=True):
            try:
                row_columns = {name: v.as_py() for name, v in zip(names, values)}
                if data.messages:
                    row_columns = _as_json(row_columns)
            except (
                ValueError,
                OverflowError,
            ) as error:  # for example a date out of range
                yield _drop_for(error, file, row)
            else:
                yield _row(row_columns, file, row, data)
            row += 1


def _as_bytes(column: pa.Array) -> pa.Array:
    """Return a text column as bytes, since a string column may contain invalid UTF-8."""
    if pa.types.is_string(column.type):
        return column.view(pa.binary())
    if pa.types.is_large_string(column.type):
        return column.view(pa.large_binary())
    return column


def _as_json(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of parquet as JSON lines have it. Raises UnicodeError for invalid UTF-8.

    Texts are bytes there, and a tool call has the keys of all rows' calls.
    """
    return {
        name: value.decode() if isinstance(value, bytes) else without_null(value)
        for name, value in columns.items()
    }


def _read_text(path: str, file: str, data: DataConfig) -> Iterator[Document | Drop]:
    """Read JSON or CSV, compressed or not, by the file's suffix and first line."""
    limit = 6 * data.max_bytes + 65536  # a JSON escape takes six characters
    with _open(path) as raw:
        stream: Any = raw
        if decompress := decompressor_of(Path(file)):
            if not raw.peek(1):
                raise EOFError("an empty archive")
            stream = io.BufferedReader(decompress(raw))
        if form_of(file) in (".csv", ".tsv"):
            yield from _csv_rows(stream, file, data, limit)
            return
        if spans_lines(stream.peek(1)):
            yield from _json_values(stream, file, data, limit)
        else:
            yield from _json_lines(stream, file, data, limit)


def _json_lines(
    lines: Any, file: str, data: DataConfig, limit: int
) -> Iterator[Document | Drop]:
    row = 0
    while line := lines.readline(limit):
        if len(line) == limit and not line.endswith(b"\n"):
            while (rest := lines.readline(limit)) and not rest.endswith(b"\n"):
                pass
            yield Drop("line too large", file, row, detail=f"over {limit} bytes")
        elif line.strip():
            try:
                columns = json.loads(line.decode("utf-8-sig" if row == 0 else "utf-8"))
            except (ValueError, RecursionError) as error:
                yield _drop_for(error, file, row)
            else:
                yield _row(columns, file, row, data)
        row += 1


def _json_values(
    stream: Any, file: str, data: DataConfig, limit: int
) -> Iterator[Document | Drop]:
    """Read a JSON list or indented objects, up to the first invalid JSON."""
    # Invalid UTF-8 becomes lone surrogates, which _row drops.
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    row = 0
    try:
        for columns in json_values(text, limit):
            yield _row(columns, file, row, data)
            row += 1
    except (ValueError, RecursionError) as error:
        yield Drop("malformed row", file, row, detail=str(error)[:200])
        yield Drop(NOT_READ, file, detail=f"from row {row} on")


def _csv_rows(
    stream: Any, file: str, data: DataConfig, limit: int
) -> Iterator[Document | Drop]:
    """Read CSV or TSV. A wrong quote makes one cell of many lines, which are dropped as one row."""
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(limit)
    lines = _Lines(text)
    rows = read_csv(lines, file)
    row = 0
    while True:
        first = lines.number + 1
        lines.quotes = 0
        try:
            columns = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if "field larger" in str(error):
                lines.skip_quoted()
            where = f"lines {first} to {lines.number}: {error}"
            yield Drop("malformed row", file, row, detail=where[:200])
        else:
            if None in columns:
                detail = "more fields than the header"
                yield Drop("malformed row", file, row, detail=detail)
            else:
                yield _row(columns, file, row, data)
        row += 1


class _Lines:
    """The lines of a CSV file; `number` counts them, and `quotes` their quotes."""

    def __init__(self, text: io.TextIOBase) -> None:
        self._text = text
        self.number = 0
        self.quotes = 0

    def __iter__(self) -> Iterator[str]:
        while line := self._text.readline():
            self._count(line)
            yield line

    def skip_quoted(self) -> None:
        """Skip lines up to the end of a quoted cell: without it they would be read as rows."""
        while self.quotes % 2 and (line := self._text.readline()):
            self._count(line)

    def _count(self, line: str) -> None:
        self.number += 1
        self.quotes += line.count('"')


# Readers of files of rows, by suffix.
READERS = dict.fromkeys(ROW_FILES, _read_text) | {".parquet": _read_parquet}


def _row(columns: Any, file: str, row: int, data: DataConfig) -> Document | Drop:
    """Return a row as a document or a Drop."""
    try:
        if not isinstance(columns, dict):
            return Drop("malformed row", file, row, detail="must be an object")
        return _document(columns, file, row, data)
    except NoConversation as error:
        return Drop("missing column", file, row, detail=str(error)[:200])
    except UnicodeError as error:
        return _drop_for(error, file, row)
    except (ValueError, OverflowError, RecursionError) as error:
        drop = _drop_for(error, file, row)
        return replace(drop, reason="unusable conversation") if data.messages else drop


def _document(
    columns: Mapping[str, Any], file: str, row: int, data: DataConfig
) -> Document | Drop:
    """Return a row as a document, or a Drop. Raises ValueError or RecursionError for malformed values."""
    if missing := [
        name
        for name in _columns(data)
        if name not in columns or (name == data.text and columns[name] is None)
    ]:
        detail = _lacking(missing, list(columns))
        return Drop("missing column", file, row, detail=detail)
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    if data.messages:
        messages = _conversation(columns, data.messages)
        tools = tuple(tools_of(columns))
    text = text_of(messages) if messages else columns[data.text]
    if not isinstance(text, str | bytes):
        return Drop("malformed row", file, row, detail=f"{data.text} must be text")
    folder = file.rpartition("/")[0].split("/")[0]
    language = _text(columns[data.language]) if data.language else folder
    language = language or "none"
    keys = [_text(columns[name]) for name in data.id]
    id = f"{language}/{'/'.join(keys)}" if any(keys) else f"{file}:{row}"
    f"{id}{language}{json.dumps([messages, tools], ensure_ascii=False)}".encode()
    content = text.encode() if isinstance(text, str) else text
    if len(content) > data.max_bytes:
        return Drop("too large", file, row, id)
    decoded = _text(text)
    if not messages:
        return Document(id, METADATA.sub("", decoded), language, file, row)
    ends = columns.get("ends") not in (False, "False", "false")
    return Document(
        id, decoded, language, file, row, ends=ends, messages=messages, tools=tools
    )


def _columns(data: DataConfig) -> list[str]:
    """Return the required columns; conversations have several formats, so their columns are not among them."""
    names = [None if data.messages else data.text, *data.id, data.language]
    return list(dict.fromkeys(filter(None, names)))


def _lacking(missing: list[str], present: list[str]) -> str:
    return f"no {', '.join(missing)}, got {', '.join(map(str, present))}"[:200]


def _conversation(columns: Mapping[str, Any], name: str) -> tuple[Message, ...]:
    """Return a row's messages. Raises ValueError unless an answer follows another message."""
    messages = conversation(columns, name)
    if all(message["role"] != "assistant" for message in messages[1:]):
        raise ValueError("must have an answer of the assistant after another message")
    return tuple(messages)


def _drop_for(error: Exception, file: str, row: int) -> Drop:
    reason = "undecodable" if isinstance(error, UnicodeError) else "malformed row"
    return Drop(reason, file, row, detail=str(error)[:200])


def _text(value: Any) -> str:
    """Return a cell as text, "" for null."""
    if value is None:
        return ""
    return value.decode() if isinstance(value, bytes) else str(value)
