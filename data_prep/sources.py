"""Where documents come from: source files, parquet or JSON lines, in a folder or on the hub.

Knows file formats, and StarCoder's metadata line, which is stripped from rows of parquet and
JSON lines; decides nothing about content beyond what cannot be read. The input is a list of
parts that depends on the files alone; whatever in a part cannot be read comes out as a Drop
with its file and row.
"""

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conf import UserError
from conf.pages import MEMORY
from data_prep.config import DataConfig
from data_prep.document import Document, Drop
from data_prep.hub import hub_files, hub_open
from data_prep.listing import is_excluded, list_files

METADATA = re.compile(r"\A<(?:reponame|filename|gh_stars)>[^\n]*\n")
PART_BYTES = 8_000_000  # of small source files that make one part
ROWS = 64  # of parquet, decoded at once
PACKED: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda stream: gzip.GzipFile(fileobj=stream),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda stream: pa.CompressedInputStream(stream, "zstd"),
}
SUFFIXES = {
    "parquet": (".parquet",),
    "jsonl": tuple(f"{plain}{packed}" for plain in (".jsonl", ".json") for packed in ("", *PACKED)),
}
# What broken files make the libraries raise.
BROKEN = (pa.ArrowException, ValueError, EOFError, zlib.error, lzma.LZMAError)
UNREADABLE = frozenset(
    {"unreadable file", "malformed row", "missing column", "column twice", "undecodable", "line too large"}
)


@dataclass(frozen=True)
class Part:
    """A piece of the input that one task reads: paths relative to `data.path`, and their bytes."""

    files: tuple[str, ...]
    size: int


def list_parts(data: DataConfig) -> tuple[list[Part], str]:
    """All parts in a fixed order, and where their files lie. Raises UserError when there is no input at all."""
    root = Path(data.path)
    if root.is_dir():
        files = list_files(root, data.include, data.exclude)
        place = str(root.absolute())
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", data.path):
        listed, place = hub_files(data.path)
        # fnmatch knows no folders: "**/*" is to match a file without one too.
        files = [f for f in listed if any(fnmatch(f[0], p) or fnmatch(f"./{f[0]}", p) for p in data.include)]
    else:
        raise UserError(f"data.path={data.path}: wanted a folder or a hub dataset's name, found no such folder")
        files = [file for file in files if not is_excluded(file[0], data.exclude)]
    if data.kind != "source":
        files = [(name, size) for name, size in files if name.endswith(SUFFIXES[data.kind])]
    if not files:
        besides = f", and none of {', '.join(data.exclude)}" if data.exclude else ""
        wanted = f"{data.kind} files ({', '.join(data.include)}{besides})"
        raise UserError(f"data.path={data.path}: wanted {wanted}, found none")
    if data.kind != "source":
        return [Part((name,), size) for name, size in files], place
    return _grouped(files), place


def _grouped(files: list[tuple[str, int]]) -> list[Part]:
    parts: list[Part] = []
    group: list[str] = []
    size = 0
    for name, length in files:
        group.append(name)
        size += length
        if size >= PART_BYTES:
            parts.append(Part(tuple(group), size))
            group, size = [], 0
    return parts + ([Part(tuple(group), size)] if group else [])


def read(part: Part, place: str, data: DataConfig) -> Iterator[Document | Drop]:
    """Every row of a part, in order.

    Raises UserError where the machine cannot read a file, which must not be passed over as a broken one is.
    """
    reader = {"source": _source, "parquet": _parquet, "jsonl": _jsonl}[data.kind]
    for file in part.files:
        try:
            with _open(place, file) as stream:
                yield from reader(stream, file, data)
        except MemoryError as error:  # Arrow's is an ArrowException too
            raise UserError(
                f"{place}/{file}: wanted memory to read it, found too little: rerun the command with fewer "
                "workers to go on from there",
                page=MEMORY,
            ) from error
        except (OSError, *BROKEN) as error:
            if isinstance(error, OSError) and error.errno is not None:  # the system's, not of a format
                raise UserError(
                    f"{place}/{file}: wanted to read it, found {error.strerror}: rerun the command to go on "
                    "from there"
                ) from error
            # What came before the broken place is kept; the rest of the file is not.
            yield Drop("unreadable file", file, detail=str(error).strip().split("\n")[0][:200])


def _open(place: str, file: str) -> Any:
    if place.startswith("hf://"):
        return hub_open(f"{place}/{file}")
    return open(Path(place) / file, "rb")


def _source(stream: io.BufferedReader, file: str, data: DataConfig) -> Iterator[Document | Drop]:
    content = stream.read(data.max_bytes + 1)
    path = Path(file)
    row = {data.text: content}
    yield _document(row, file, 0, data, id=file, language=path.suffix.lstrip(".") or "none")


def _parquet(stream: Any, file: str, data: DataConfig) -> Iterator[Document | Drop]:
    # Pages whose writer gave them checksums are compared with these: a changed bit is often no broken file.
    table = pq.ParquetFile(
        stream,
        metadata=_parquet_metadata(stream),
        pre_buffer=False,
        buffer_size=2**20,
        page_checksum_verification=True,
    )
    wanted = [data.text, *data.id, *([data.language] if data.language else [])]
    missing = [name for name in wanted if name not in table.schema_arrow.names]
    if missing:
        yield Drop("missing column", file, detail=", ".join(missing))
        return
    if twice := [name for name in wanted if table.schema_arrow.names.count(name) > 1]:
        yield Drop("column twice", file, detail=", ".join(twice))
        return
    row = 0
    for batch in table.iter_batches(ROWS, columns=wanted, use_threads=False):
        columns = {name: _as_bytes(batch.column(name)) for name in wanted}
        for index in range(batch.num_rows):
            yield _parquet_row({name: column[index] for name, column in columns.items()}, file, row, data)
            row += 1


def _parquet_metadata(stream: Any) -> pq.FileMetaData:
    """The file's metadata without the Arrow schema that its writer may have left there.

    By that schema Arrow casts text to the writer's own types, such as dictionaries, and one row that is no
    UTF-8 fails the cast of all rows. No option of pyarrow ignores it; under another name it is not met.
    """
    size = stream.seek(0, io.SEEK_END)
    stream.seek(max(0, size - 8))
    tail = stream.read(8)  # the footer's length, and PAR1
    length = int.from_bytes(tail[:4], "little")
    if not 0 < length <= size - 12:
        raise ValueError("no footer of parquet")
    stream.seek(size - 8 - length)
    footer = stream.read(length).replace(b"ARROW:schema", b"ARROW:unused")
    return pq.read_metadata(pa.BufferReader(b"PAR1" + footer + tail))


def _parquet_row(values: dict[str, pa.Scalar], file: str, row: int, data: DataConfig) -> Document | Drop:
    """A row; some values Python cannot have: a list with text that is no UTF-8, a date out of range."""
    try:
        fields = {name: value.as_py() for name, value in values.items()}
    except UnicodeDecodeError as error:
        return Drop("undecodable", file, row, detail=str(error)[:200])
    except (pa.ArrowException, ValueError, OverflowError) as error:
        return Drop("malformed row", file, row, detail=str(error)[:200])
    return _document(fields, file, row, data)


def _as_bytes(column: pa.Array) -> pa.Array:
    """A column with its text as bytes: a string column may hold what is no UTF-8."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        large = pa.types.is_large_string(column.type)
        column = column.view(pa.large_binary() if large else pa.binary())
    return column


def _jsonl(stream: Any, file: str, data: DataConfig) -> Iterator[Document | Drop]:
    packed = PACKED.get(Path(file).suffix)
    if packed is not None:
        if not stream.peek(1):
            raise EOFError("an archive of no bytes")  # even of no text it has a head
        stream = packed(stream)
    lines = io.BufferedReader(stream) if not isinstance(stream, io.BufferedReader) else stream
    limit = 6 * data.max_bytes + 65536  # JSON may spell a character in six
    row = 0
    while line := lines.readline(limit):
        if len(line) == limit and not line.endswith(b"\n"):
            while (rest := lines.readline(limit)) and not rest.endswith(b"\n"):
                continue
            yield Drop("line too large", file, row, detail=f"over {limit} bytes")
        elif line.strip():
            yield _parsed(line, file, row, data)
        row += 1


def _parsed(line: bytes, file: str, row: int, data: DataConfig) -> Document | Drop:
    try:
        value = json.loads(line.decode("utf-8-sig" if row == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        return Drop("undecodable", file, row, detail=str(error)[:200])
    except (ValueError, RecursionError) as error:
        return Drop("malformed row", file, row, detail=str(error)[:200])
    if not isinstance(value, dict):
        return Drop("malformed row", file, row, detail=f"wanted an object, found {type(value).__name__}")
    return _document(value, file, row, data)


def _document(
    values: dict[str, Any], file: str, row: int, data: DataConfig, *, id: str = "", language: str = ""
) -> Document | Drop:
    """One row as a document; `id` and `language` where the columns are not to say them."""
    for name in (data.text, *data.id, *([data.language] if data.language and not language else [])):
        if values.get(name) is None:
            return Drop("missing column", file, row, detail=name)
    text = values[data.text]
    if not isinstance(text, str | bytes):
        return Drop("malformed row", file, row, detail=f"{data.text}: wanted text, found {type(text).__name__}")
    try:
        folder, _, _ = file.rpartition("/")
        named = _text(values[data.language]) if data.language else folder.split("/")[0]
        language = language or named or "none"
        columns = "/".join(_text(values[name]) for name in data.id)
        id = id or (f"{language}/{columns}" if columns else f"{file}:{row}")
        f"{id}{language}".encode()  # JSON and file names can hold halves of surrogate pairs
        if (len(text) if isinstance(text, bytes) else len(text.encode())) > data.max_bytes:
            return Drop("too large", file, row, id)
        text = _text(text)
    except UnicodeError as error:
        return Drop("undecodable", file, row, detail=str(error)[:200])
    except RecursionError as error:  # an id of lists within lists
        return Drop("malformed row", file, row, detail=str(error)[:200])
    if data.kind != "source":
        text = METADATA.sub("", text, count=1)
    return Document(id, text, language, file, row)


def _text(value: Any) -> str:
    """A value of a column as text."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
