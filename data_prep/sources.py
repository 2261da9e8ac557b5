"""Where documents come from: source files, parquet or JSON lines, in a folder or in a dataset on the hub.

Knows file formats, and StarCoder's metadata line, which is stripped from rows of parquet and JSON lines;
decides nothing about content beyond what cannot be read. The input is a list of parts that depends on the files
alone; whatever in a part cannot be read comes out as a Drop with its file and row.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch, fnmatchcase
from logging import getLogger
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conf import UserError
from conf.errors import HUB, MEMORY, visible
from conf.hub import hub_refusal
from data_prep.config import DataConfig
from data_prep.document import Document, Drop

METADATA = re.compile(r"\A<(?:reponame|filename|gh_stars)>[^\n]*\n")
PART_BYTES = 8_000_000  # of small source files that make one part
ROWS = 64  # of parquet, decoded at once
GIT = ".git"  # of a checkout, which is no source
PACKED: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda stream: gzip.GzipFile(fileobj=stream),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda stream: pa.CompressedInputStream(stream, "zstd"),
}
SUFFIXES = {
    "parquet": (".parquet",),
    "jsonl": tuple(
        f"{plain}{packed}" for plain in (".jsonl", ".json") for packed in ("", *PACKED)
    ),
}
# What broken files make the libraries raise.
BROKEN = (pa.ArrowException, ValueError, EOFError, zlib.error, lzma.LZMAError)
UNREADABLE = frozenset(
    {
        "unreadable file",
        "malformed row",
        "missing column",
        "column twice",
        "undecodable",
        "line too large",
    }
)


@dataclass(frozen=True)
class InputPart:
    """A piece of the input that one task reads: paths relative to `data.path`, and their bytes."""

    files: tuple[str, ...]
    size: int


def list_parts(data: DataConfig) -> tuple[list[InputPart], str]:
    """Return all parts in a fixed order, and where their files lie. Raises UserError when there is no input."""
    root = Path(data.path)
    if root.is_dir():
        files = list_files(root, data.include, data.exclude)
        place = str(root.absolute())
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", data.path):
        listed, place = _hub_files(data.path)
        # fnmatch knows no folders: "**/*" is to match a file without one too.
        files = [
            (name, size)
            for name, size in listed
            if any(
                fnmatch(name, pattern) or fnmatch(f"./{name}", pattern)
                for pattern in data.include
            )
            and not _is_excluded(name, data.exclude)
        ]
    else:
        raise UserError(
            f"data.path={data.path} must be a folder or a hub dataset's name, got no such folder"
        )
    if data.kind != "source":
        files = [
            (name, size) for name, size in files if name.endswith(SUFFIXES[data.kind])
        ]
    if not files:
        besides = f", and none of {', '.join(data.exclude)}" if data.exclude else ""
        kinds = f"{data.kind} files ({', '.join(data.include)}{besides})"
        raise UserError(f"data.path={data.path} must have {kinds}, got none")
    if data.kind != "source":
        return [InputPart((name,), size) for name, size in files], place
    parts: list[InputPart] = []
    group: list[str] = []
    size = 0
    for name, length in files:
        group.append(name)
        size += length
        if size >= PART_BYTES or name == files[-1][0]:
            parts.append(InputPart(tuple(group), size))
            group = []
            size = 0
    return parts, place


def list_files(
    root: Path, include: Sequence[str], exclude: Sequence[str]
) -> list[tuple[str, int]]:
    """Return (path below root, bytes) of the files that match `include` and not `exclude`, both globs, sorted.

    Linked folders are followed, once each. Warns, with a count, of links that lead nowhere and of folders that
    cannot be listed. Raises UserError for what is no glob below `root`.
    """
    patterns = [_glob_parts(pattern, include) for pattern in include]
    files = []
    dead: list[str] = []
    closed: list[str] = []

    def accepts(name: str) -> bool:
        parts = name.split("/")
        return any(
            _matches(parts, pattern) for pattern in patterns
        ) and not _is_excluded(name, exclude)

    for name in _walk(root, accepts, closed):
        path = root / name
        try:
            size = path.stat().st_size
        except (
            OSError
        ):  # a link to nothing or to itself, or a file that was removed since
            dead.append(name)
            continue
        if path.is_file():
            files.append((name, size))
    closed = [name for name in closed if not _is_excluded(f"{name}/", exclude)]
    for names, what in (
        (dead, "links lead to no file"),
        (closed, "folders cannot be listed"),
    ):
        if names:
            first = visible(f"{root / names[0]}")
            getLogger(__name__).warning(
                "data.path: %d %s and are left out, first %s", len(names), what, first
            )
    return sorted(files, key=lambda file: Path(file[0]))


def _is_excluded(name: str, exclude: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in exclude)


def _walk(
    root: Path, accepts: Callable[[str], bool], closed: list[str]
) -> Iterator[str]:
    """Yield the paths below `root` of files that `accepts` wants; folders that cannot be listed go to `closed`.

    First what lies in `root` itself, then what lies in linked folders. A folder that gave a path is not entered
    again, so that a text that two links lead to is read once; one that gave none may match a link's
    name. Each link is followed once, so that a link back ends.
    """

    def note(error: OSError) -> None:
        closed.append(os.path.relpath(error.filename, root))

    visited: set[tuple[int, int]] = set()
    read: set[tuple[int, int]] = set()
    links = [os.fspath(root)]
    while links:
        for folder, names, files in os.walk(links.pop(0), onerror=note):
            facts = os.stat(folder)
            place = facts.st_dev, facts.st_ino
            if place in read:
                names.clear()
                continue
            names[:] = sorted(name for name in names if name != GIT)
            if place not in visited:
                visited.add(place)
                links += [
                    path
                    for name in names
                    if os.path.islink(path := os.path.join(folder, name))
                ]
            paths = [
                os.path.relpath(os.path.join(folder, name), root)
                for name in sorted(files)
                if name != GIT
            ]
            accepted = [path for path in paths if accepts(path)]
            if accepted:
                read.add(place)
            yield from accepted


def _glob_parts(pattern: str, include: Sequence[str]) -> list[str]:
    """Return the parts of a glob, as pathlib reads them."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    stars = [part for part in parts if "**" in part]
    if (
        not parts
        or pattern.startswith("/")
        or ".." in parts
        or any(part != "**" for part in stars)
    ):
        raise UserError(
            f"data.include={list(include)} must be globs below data.path, such as **/*.py, got '{pattern}'"
        )
    return parts


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a path matches a glob part by part; ** matches any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        rest = pattern[1:] or ["*"]
        return any(_matches(parts[at:], rest) for at in range(len(parts)))
    return (
        bool(parts)
        and fnmatchcase(parts[0], pattern[0])
        and _matches(parts[1:], pattern[1:])
    )


def _hub_files(name: str) -> tuple[list[tuple[str, int]], str]:
    """Return the dataset's files with their bytes, sorted, and the address of the commit they are of.

    Sign-in is the hub's own (HF_TOKEN, or `hf auth login`). Raises UserError when the hub does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    try:
        commit = api.dataset_info(name).sha
        tree = api.list_repo_tree(
            name, repo_type="dataset", revision=commit, recursive=True
        )
        files = sorted(
            (entry.path, entry.size) for entry in tree if isinstance(entry, RepoFile)
        )
    except Exception as error:  # of the library or of its HTTP client
        start = f"data.path={name} must be a folder or a dataset on the hub, got no such folder"
        raise UserError(
            f"{start}, and {hub_refusal(error, 'dataset')}", page=HUB
        ) from error
    return files, f"hf://datasets/{name}@{commit}"


class _HubFile(io.RawIOBase):
    """A file of the hub, read in ranges and never stored.

    The hub's errors become UserError: the file must not be passed over for them, as a broken one is.
    """

    def __init__(self, address: str) -> None:
        from huggingface_hub import HfFileSystem

        self._address = address
        self._file = self._call(
            lambda: HfFileSystem().open(address.removeprefix("hf://"), "rb")
        )

    def _call(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except Exception as error:
            raise UserError(
                f"{self._address} must be readable, got {type(error).__name__} from the hub. Rerun the command "
                "to go on from there",
                page=HUB,
            ) from error

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        data = self._call(lambda: self._file.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)


def read(part: InputPart, place: str, data: DataConfig) -> Iterator[Document | Drop]:
    """Yield every row of a part, in order.

    Raises UserError where the machine cannot read a file, which must not be passed over as a broken one is.
    """
    reader = {"source": _read_source, "parquet": _read_parquet, "jsonl": _read_jsonl}[
        data.kind
    ]
    for file in part.files:
        try:
            with _open(f"{place}/{file}") as stream:
                yield from reader(stream, file, data)
        except MemoryError as error:  # Arrow's is an ArrowException too
            raise UserError(
                f"{place}/{file} must fit into memory, got too little. Rerun the command with fewer workers to "
                "go on from there",
                page=MEMORY,
            ) from error
        except (OSError, *BROKEN) as error:
            if (
                isinstance(error, OSError) and error.errno is not None
            ):  # the system's, not of a format
                raise UserError(
                    f"{place}/{file} must be readable, got {error.strerror}. Rerun the command to go on from "
                    "there"
                ) from error
            # What came before the broken place is read; the rest of the file is not.
            yield Drop(
                "unreadable file", file, detail=str(error).strip().split("\n")[0][:200]
            )


def _open(path: str) -> Any:
    if path.startswith("hf://"):
        return io.BufferedReader(_HubFile(path), buffer_size=2**20)
    return open(path, "rb")


def _read_source(
    stream: io.BufferedReader, file: str, data: DataConfig
) -> Iterator[Document | Drop]:
    row = {data.text: stream.read(data.max_bytes + 1)}
    yield _document(
        row, file, 0, data, id=file, language=Path(file).suffix.lstrip(".") or "none"
    )


def _read_parquet(
    stream: Any, file: str, data: DataConfig
) -> Iterator[Document | Drop]:
    # Pages whose writer gave them checksums are compared with these: a changed bit is often no broken file.
    table = pq.ParquetFile(
        stream,
        metadata=_parquet_metadata(stream),
        pre_buffer=False,
        buffer_size=2**20,
        page_checksum_verification=True,
    )
    names_read = [data.text, *data.id, *([data.language] if data.language else [])]
    names = table.schema_arrow.names
    for reason, wrong in (
        ("missing column", [name for name in names_read if name not in names]),
        ("column twice", [name for name in names_read if names.count(name) > 1]),
    ):
        if wrong:
            yield Drop(reason, file, detail=", ".join(wrong))
            return
    row = 0
    for batch in table.iter_batches(ROWS, columns=names_read, use_threads=False):
        columns = {name: _as_bytes(batch.column(name)) for name in names_read}
        for index in range(batch.num_rows):
            yield _parquet_row(
                {name: column[index] for name, column in columns.items()},
                file,
                row,
                data,
            )
            row += 1


def _parquet_metadata(stream: Any) -> pq.FileMetaData:
    """Return the file's metadata without the Arrow schema that its writer may have left there.

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


def _parquet_row(
    values: dict[str, pa.Scalar], file: str, row: int, data: DataConfig
) -> Document | Drop:
    try:
        columns = {name: value.as_py() for name, value in values.items()}
    except (pa.ArrowException, ValueError, OverflowError) as error:
        # Text in a list that is no UTF-8 (other texts are bytes), or a date out of Python's range.
        return _drop_for(error, file, row)
    return _document(columns, file, row, data)


def _as_bytes(column: pa.Array) -> pa.Array:
    """Return a column with its text as bytes: a string column may hold what is no UTF-8."""
    if pa.types.is_string(column.type):
        return column.view(pa.binary())
    return (
        column.view(pa.large_binary())
        if pa.types.is_large_string(column.type)
        else column
    )


def _read_jsonl(stream: Any, file: str, data: DataConfig) -> Iterator[Document | Drop]:
    if unpack := PACKED.get(Path(file).suffix):
        if not stream.peek(1):
            raise EOFError("an archive of no bytes")  # even of no text it has a head
        stream = unpack(stream)
    lines = (
        stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)
    )
    limit = 6 * data.max_bytes + 65536  # JSON may spell a character in six
    row = 0
    while line := lines.readline(limit):
        if len(line) == limit and not line.endswith(b"\n"):
            while (rest := lines.readline(limit)) and not rest.endswith(b"\n"):
                continue
            yield Drop("line too large", file, row, detail=f"over {limit} bytes")
        elif line.strip():
            yield _jsonl_row(line, file, row, data)
        row += 1


def _jsonl_row(line: bytes, file: str, row: int, data: DataConfig) -> Document | Drop:
    try:
        columns = json.loads(line.decode("utf-8-sig" if row == 0 else "utf-8"))
    except (ValueError, RecursionError) as error:
        return _drop_for(error, file, row)
    if not isinstance(columns, dict):
        return Drop(
            "malformed row",
            file,
            row,
            detail=f"must be an object, got {type(columns).__name__}",
        )
    return _document(columns, file, row, data)


def _document(
    columns: dict[str, Any],
    file: str,
    row: int,
    data: DataConfig,
    *,
    id: str = "",
    language: str = "",
) -> Document | Drop:
    """Return one row as a document; `id` and `language` are given where the columns are not to say them."""
    for name in (
        data.text,
        *data.id,
        *([data.language] if data.language and not language else []),
    ):
        if columns.get(name) is None:
            return Drop("missing column", file, row, detail=name)
    text = columns[data.text]
    if not isinstance(text, str | bytes):
        return Drop(
            "malformed row",
            file,
            row,
            detail=f"{data.text}: must be text, got {type(text).__name__}",
        )
    try:
        named = (
            _text(columns[data.language])
            if data.language
            else file.rpartition("/")[0].split("/")[0]
        )
        language = language or named or "none"
        key = "/".join(_text(columns[name]) for name in data.id)
        id = id or (f"{language}/{key}" if key else f"{file}:{row}")
        f"{id}{language}".encode()  # JSON and file names can hold halves of surrogate pairs
        if (
            len(text) if isinstance(text, bytes) else len(text.encode())
        ) > data.max_bytes:
            return Drop("too large", file, row, id)
        text = _text(text)
    except (
        UnicodeError,
        RecursionError,
    ) as error:  # the latter: an id of lists within lists
        return _drop_for(error, file, row)
    if data.kind != "source":
        text = METADATA.sub("", text, count=1)
    return Document(id, text, language, file, row)


def _drop_for(error: Exception, file: str, row: int) -> Drop:
    reason = "undecodable" if isinstance(error, UnicodeError) else "malformed row"
    return Drop(reason, file, row, detail=str(error)[:200])


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
