"""Read documents from source files, parquet or JSON lines, in a folder or a hub dataset.

`datasets` reads parquet. JSON lines are read here: its "json" ends a file at the first
malformed line, its "text" needs seven times a line's size in memory. The input is a list
of parts that depends on the files alone. A row or file that cannot be read becomes a
Drop; nothing else is decided about content, but StarCoder's metadata line is removed.
"""

import bz2
import gzip
import io
import json
import logging
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pyarrow as pa

from conf import UserError
from conf.errors import HUB, MEMORY, Refusing, describe_error, in_one_line, visible
from conf.hub import hub_refusal
from data_prep.config import DataConfig
from data_prep.document import Document, Drop, Message, text_of

METADATA = re.compile(r"\A<(?:reponame|filename|gh_stars)>[^\n]*\n")
REMOTE = "hf://"
PART_BYTES = 8_000_000  # of small source files that make one part
BINARY_BYTES = 8000  # a file with a zero among them is binary, as to git
BATCH_ROWS = 64  # rows of parquet that are decoded at once
DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda stream: pa.CompressedInputStream(stream, "zstd"),
}
ROLES = ("system", "user", "assistant")
SUFFIXES = {
    "source": ("",),
    "parquet": (".parquet",),
    "jsonl": tuple(
        f"{plain}{packed}"
        for plain in (".jsonl", ".json")
        for packed in ("", *DECOMPRESSORS)
    ),
}
# Errors of libraries about damaged files.
FORMAT_ERRORS = (pa.ArrowException, ValueError, EOFError, zlib.error, lzma.LZMAError)
UNREADABLE = frozenset(
    {
        "unreadable file",
        "malformed row",
        "missing column",
        "undecodable",
        "line too large",
    }
)


@dataclass(frozen=True)
class InputPart:
    """The files that one task reads: paths below `data.path`, and their bytes."""

    files: tuple[str, ...]
    size: int


def list_parts(data: DataConfig) -> tuple[list[InputPart], str]:
    """Return all parts in a fixed order, and the folder or address of their files.

    Source files are grouped into parts of PART_BYTES. Raises UserError without input.
    """
    from fsspec.utils import glob_translate

    with Refusing("data.include must be globs below data.path, got"):
        included = [re.compile(glob_translate(glob)) for glob in data.include]

    def accepts(name: str) -> bool:
        return (
            name.endswith(SUFFIXES[data.kind])
            and any(glob.match(name) for glob in included)
            and not any(fnmatch(name, glob) for glob in data.exclude)
        )

    if Path(data.path).is_dir():
        place = os.path.abspath(data.path)
        sizes = _local_files(place, accepts)
    else:
        place, sizes = _hub_files(data.path, accepts)
    if not sizes:
        raise UserError(
            f"data.path={data.path} must have {data.kind} files that match "
            f"data.include={data.include} and not data.exclude, got none"
        )
    limit = PART_BYTES if data.kind == "source" else 0
    parts: list[InputPart] = []
    group: list[str] = []
    size = 0
    for name in sorted(sizes, key=Path):
        group.append(name)
        size += sizes[name]
        if size >= limit:
            parts.append(InputPart(tuple(group), size))
            group = []
            size = 0
    if group:
        parts.append(InputPart(tuple(group), size))
    return parts, place


def _local_files(root: str, accepts: Callable[[str], bool]) -> dict[str, int]:
    """Return the accepted files below a folder with their bytes.

    Linked folders are followed; a file that several links lead to is listed once.
    """
    sizes: dict[str, int] = {}
    listed: set[str] = set()
    dead_links: list[str] = []

    def visit(folder: str, parents: frozenset[str]) -> None:
        real = os.path.realpath(folder)
        if real in parents:  # a link back
            return
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            name = os.path.relpath(entry.path, root)
            target = os.path.join(real, entry.name)
            if entry.is_dir():
                visit(entry.path, parents | {real})
            elif accepts(name) and target not in listed:
                listed.add(target)
                if entry.is_file():
                    sizes[name] = entry.stat().st_size
                else:
                    dead_links.append(entry.path)

    visit(root, frozenset())
    if dead_links:
        logging.getLogger(__name__).warning(
            "data.path: %d links lead to no file and are left out, first %s",
            len(dead_links),
            visible(dead_links[0]),
        )
    return sizes


def _hub_files(name: str, accepts: Callable[[str], bool]) -> tuple[str, dict[str, int]]:
    """Return the address of a dataset's newest commit, and its files with their bytes.

    Sign-in is the hub's own (HF_TOKEN, or `hf auth login`).
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    try:
        commit = api.dataset_info(name).sha
        tree = api.list_repo_tree(
            name, repo_type="dataset", revision=commit, recursive=True
        )
        files = [entry for entry in tree if isinstance(entry, RepoFile)]
    except Exception as error:  # of the library or of its HTTP client
        raise UserError(
            f"data.path={name} must be a folder or a dataset on the hub, got no such "
            f"folder, and {hub_refusal(error, 'dataset')}",
            page=HUB,
        ) from error
    sizes = {file.path: file.size for file in files if accepts(file.path)}
    return f"{REMOTE}datasets/{name}@{commit}", sizes


def read(part: InputPart, place: str, data: DataConfig) -> Iterator[Document | Drop]:
    """Yield every row of a part, in order.

    A damaged file is read up to its damage. Raises UserError for a file that the machine
    or the hub does not give: it must not be counted as a damaged one.
    """
    readers = {"source": _read_source, "parquet": _read_parquet, "jsonl": _read_jsonl}
    for file in part.files:
        try:
            yield from readers[data.kind](f"{place}/{file}", file, data)
        except Exception as error:
            if _is_damage(error):
                yield Drop("unreadable file", file, detail=in_one_line(error, 200))
                continue
            raise UserError(
                f"{place}/{file} must be readable, got {describe_error(error)}. Rerun "
                "the command to go on from there, with fewer workers for want of memory",
                page=MEMORY if isinstance(error, MemoryError) else None,
            ) from error


def _is_damage(error: Exception) -> bool:
    """Return True for a damaged file, False for one that could not be read.

    Codecs raise a plain OSError without a number; the hub's errors are OSErrors of other
    classes, of which some are ValueErrors too.
    """
    if isinstance(error, OSError):
        plain = type(error) in (OSError, gzip.BadGzipFile)
        return plain and error.errno is None
    return isinstance(error, FORMAT_ERRORS) and not isinstance(error, MemoryError)


def _open(path: str) -> io.BufferedReader:
    """Open a file for reading; one of the hub is read in ranges and never stored."""
    if not path.startswith(REMOTE):
        return open(path, "rb")
    from huggingface_hub import HfFileSystem

    file = HfFileSystem().open(path.removeprefix(REMOTE), "rb")
    return io.BufferedReader(file, buffer_size=2**20)


def _read_source(path: str, file: str, data: DataConfig) -> Iterator[Document | Drop]:
    with _open(path) as stream:
        text = stream.read(data.max_bytes + 1)
    try:
        file.encode()
        if len(text) > data.max_bytes:
            yield Drop("too large", file, 0, file)
        elif b"\0" in text[:BINARY_BYTES]:
            yield Drop("binary", file, 0, file)
        else:
            language = Path(file).suffix.lstrip(".") or "none"
            yield Document(file, text.decode(), language, file)
    except UnicodeError as error:
        yield Drop("undecodable", file, 0, detail=str(error)[:200])


def _read_parquet(path: str, file: str, data: DataConfig) -> Iterator[Document | Drop]:
    import datasets
    from pyarrow.dataset import ParquetFragmentScanOptions
    from pyarrow.parquet import read_schema

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # a request for every file
    datasets.logging.set_verbosity(logging.CRITICAL)
    names = _columns(data)
    if data.messages:
        with _open(path) as stream:
            if "ends" in read_schema(stream).names:
                names.append("ends")
    rows = datasets.load_dataset(
        "parquet",
        data_files=[path],
        split="train",
        streaming=True,
        columns=names,
        batch_size=BATCH_ROWS,
        # A page whose writer gave it a checksum is compared with it.
        fragment_scan_options=ParquetFragmentScanOptions(
            page_checksum_verification=True
        ),
    )
    if missing := [name for name in names if name not in rows.column_names]:
        yield Drop("missing column", file, detail=", ".join(missing))
        return
    row = 0
    for table in rows.with_format("arrow").iter(BATCH_ROWS):
        columns = [_as_bytes(table[name].combine_chunks()) for name in names]
        for values in zip(*columns, strict=True):
            try:
                yield _document(
                    {name: value.as_py() for name, value in zip(names, values)},
                    file,
                    row,
                    data,
                )
            except (ValueError, OverflowError) as error:  # a date out of range
                yield _drop_for(error, file, row)
            row += 1


def _as_bytes(column: pa.Array) -> pa.Array:
    """Return a column with its text as bytes: a string column may hold no UTF-8."""
    if pa.types.is_string(column.type):
        return column.view(pa.binary())
    if pa.types.is_large_string(column.type):
        return column.view(pa.large_binary())
    return column


def _read_jsonl(path: str, file: str, data: DataConfig) -> Iterator[Document | Drop]:
    limit = 6 * data.max_bytes + 65536  # JSON may spell a character in six
    with _open(path) as raw:
        lines: Any = raw
        if decompress := DECOMPRESSORS.get(Path(file).suffix):
            if not raw.peek(1):
                raise EOFError("an archive of no bytes")
            lines = io.BufferedReader(decompress(raw))
        row = 0
        while line := lines.readline(limit):
            if len(line) == limit and not line.endswith(b"\n"):
                while (rest := lines.readline(limit)) and not rest.endswith(b"\n"):
                    pass
                yield Drop("line too large", file, row, detail=f"over {limit} bytes")
            elif line.strip():
                yield _json_row(line, file, row, data)
            row += 1


def _json_row(line: bytes, file: str, row: int, data: DataConfig) -> Document | Drop:
    try:
        columns = json.loads(line.decode("utf-8-sig" if row == 0 else "utf-8"))
        if not isinstance(columns, dict):
            return Drop("malformed row", file, row, detail="must be an object")
        return _document(columns, file, row, data)
    except (ValueError, RecursionError) as error:
        return _drop_for(error, file, row)


def _document(
    columns: Mapping[str, Any], file: str, row: int, data: DataConfig
) -> Document | Drop:
    """Return a row as a document. Raises ValueError or RecursionError for odd values."""
    if missing := [name for name in _columns(data) if columns.get(name) is None]:
        return Drop("missing column", file, row, detail=missing[0])
    messages = _conversation(columns[data.messages]) if data.messages else ()
    text = text_of(messages) if messages else columns[data.text]
    if not isinstance(text, str | bytes):
        return Drop("malformed row", file, row, detail=f"{data.text} must be text")
    folder = file.rpartition("/")[0].split("/")[0]
    language = _text(columns[data.language]) if data.language else folder
    language = language or "none"
    key = "/".join(_text(columns[name]) for name in data.id)
    id = f"{language}/{key}" if key else f"{file}:{row}"
    f"{id}{language}".encode()  # refuse halves of surrogate pairs
    content = text.encode() if isinstance(text, str) else text
    if len(content) > data.max_bytes:
        return Drop("too large", file, row, id)
    decoded = _text(text)
    if not messages:
        return Document(id, METADATA.sub("", decoded), language, file, row)
    ends = columns.get("ends") is not False
    return Document(id, decoded, language, file, row, ends=ends, messages=messages)


def _columns(data: DataConfig) -> list[str]:
    """Return the columns that every row must have."""
    names = [data.messages or data.text, *data.id, data.language]
    return list(dict.fromkeys(filter(None, names)))


def _conversation(value: Any) -> tuple[Message, ...]:
    """Return a row's messages. Raises ValueError unless an answer follows others."""
    if (
        not isinstance(value, list)
        or not all(
            isinstance(message, dict)
            and message.get("role") in ROLES
            and isinstance(message.get("content"), str)
            for message in value
        )
        or all(message["role"] != "assistant" for message in value[1:])
    ):
        raise ValueError(
            f"must be messages of {', '.join(ROLES)}, an answer after others"
        )
    return tuple(
        {"role": message["role"], "content": message["content"]} for message in value
    )


def _drop_for(error: Exception, file: str, row: int) -> Drop:
    reason = "undecodable" if isinstance(error, UnicodeError) else "malformed row"
    return Drop(reason, file, row, detail=str(error)[:200])


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
