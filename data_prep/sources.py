"""Read documents from source files or files of rows: one file, a folder, a hub dataset.

Rows are JSON lines, a JSON list, indented JSON, CSV, TSV or parquet, by the file's
suffix. `datasets` reads parquet. JSON lines are read here: its "json" ends a file at the
first malformed line, its "text" needs seven times a line's size in memory. The input is a
list of parts that depends on the files alone. A row or file that cannot be read becomes a
Drop; nothing else is decided about content, but StarCoder's metadata line is removed.
"""

import csv
import gzip
import io
import json
import logging
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pyarrow as pa

from conf import UserError
from conf.conversations import BESIDE, COLUMNS, NoConversation, conversation, tools_of
from conf.errors import HUB, MEMORY, Refusing, describe_error, in_one_line, visible
from conf.hub import hub_refusal
from conf.rows import (
    DECOMPRESSORS,
    ROW_FILES,
    form_of,
    json_values,
    read_csv,
    spans_lines,
)
from data_prep.config import DataConfig
from data_prep.document import Document, Drop, Message, text_of

METADATA = re.compile(r"\A<(?:reponame|filename|gh_stars)>[^\n]*\n")
REMOTE = "hf://"
CARD = "README.md"  # of a dataset on the hub
PART_BYTES = 8_000_000  # of small source files that make one part
BINARY_BYTES = 8000  # a file with a zero among them is binary, as to git
BATCH_ROWS = 64  # rows of parquet that are decoded at once
SUFFIXES = {"source": ("",), "parquet": (".parquet",), "jsonl": ROW_FILES}
NAMES = 8  # of a linked folder that are tried against the globs
# Words of a path that say which split it is, as `datasets` reads them.
TEST = ("test", "testing", "tests")
# Errors of libraries about damaged files.
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
NO_FILE = "link or device, no file"


@dataclass(frozen=True)
class InputPart:
    """The files that one task reads: paths below `data.path`, and their bytes.

    `odd` are links that lead to no file, and devices: each becomes a Drop.
    """

    files: tuple[str, ...]
    size: int
    odd: tuple[str, ...] = ()


@dataclass
class Listing:
    """The files below data.path with their bytes, and the `odd` ones of InputPart."""

    sizes: dict[str, int]
    odd: tuple[str, ...] = ()
    split: bool = False  # True if the files are those of data.split already


def list_parts(data: DataConfig) -> tuple[list[InputPart], str]:
    """Return all parts in a fixed order, and the folder or address of their files.

    Source files are grouped into parts of PART_BYTES. Raises UserError without input.
    """
    from fsspec.utils import glob_translate

    with Refusing("data.include must be globs below data.path, got"):
        included = [re.compile(glob_translate(glob)) for glob in data.include]
    others: Counter[str] = Counter()

    def accepts(name: str) -> bool:
        if any(fnmatch(name, glob) for glob in data.exclude) or not any(
            glob.match(name) for glob in included
        ):
            return False
        fits = data.kind == "source" or form_of(name) in SUFFIXES[data.kind]
        others[form_of(name) or "no suffix"] += not fits
        return fits

    if Path(data.path).is_file():
        place, listing = _single_file(data)
    elif Path(data.path).is_dir():
        place = os.path.abspath(data.path)
        listing = _local_files(place, accepts)
    else:
        place, listing = _hub_files(data, accepts)
    sizes = listing.sizes if listing.split else _of_split(listing.sizes, data)
    if not sizes:
        found = ", ".join(f"{count} {name}" for name, count in others.most_common(5))
        raise UserError(
            f"data.path={data.path} must have {data.kind} files that match data.include="
            f"{data.include}, data.split={data.split} and not data.exclude, got "
            f"{found or 'none'}. Correct these settings, or convert the files to "
            f"{', '.join(filter(None, SUFFIXES[data.kind])) or 'text'}"
        )
    _check_kind(data, sizes)
    limit = PART_BYTES if data.kind == "source" else 0
    parts: list[InputPart] = []
    group: list[str] = []
    size = 0
    odd = listing.odd
    for name in sorted(sizes, key=Path):
        group.append(name)
        size += sizes[name]
        if size >= limit:
            parts.append(InputPart(tuple(group), size, odd))
            group, size, odd = [], 0, ()
    if group:
        parts.append(InputPart(tuple(group), size, odd))
    return parts, place


def _single_file(data: DataConfig) -> tuple[str, Listing]:
    """Return a file's folder and the file. Raises UserError for one of another form."""
    path = Path(os.path.abspath(data.path))
    form = form_of(path.name)
    if data.kind != "source" and form not in SUFFIXES[data.kind]:
        raise UserError(
            f"data.path={data.path} must be a file of {', '.join(SUFFIXES[data.kind])} "
            f"for data.kind={data.kind}, got {form or 'no suffix'}. Convert it to JSON "
            "lines, or rename it"
        )
    return str(path.parent), Listing({path.name: path.stat().st_size}, split=True)


def _check_kind(data: DataConfig, sizes: Mapping[str, int]) -> None:
    """Raise UserError if files of rows alone are given as source code."""
    rows = [*ROW_FILES[:2], *ROW_FILES[3:]]  # a .json file may be source code
    if data.kind == "source" and all(form_of(name) in rows for name in sizes):
        first = min(sizes)
        raise UserError(
            f"data.path={data.path} must be source code, got files of rows such as "
            f"{first}. Add data=chat for conversations, or data=jsonl for documents"
        )


def split_words(name: str) -> set[str]:
    """Return the words of a path: data/train_sft-0.parquet has train, sft, train_sft."""
    patterns = (r"\w+", "[a-z_]+", "[a-z]+")
    return {word for pattern in patterns for word in re.findall(pattern, name.lower())}


def _of_split(sizes: dict[str, int], data: DataConfig) -> dict[str, int]:
    """Return the files of data.split; by default all but those of a test split."""
    if data.kind == "source":
        return sizes
    if data.split:
        wanted = data.split.lower()
        return {
            name: size for name, size in sizes.items() if wanted in split_words(name)
        }
    kept = {
        name: size
        for name, size in sizes.items()
        if not split_words(name).intersection(TEST)
    }
    if len(kept) < len(sizes):
        logging.getLogger(__name__).warning(
            "data.path: %d files of a test split are left out, first %s. Give "
            "data.split to read them",
            len(sizes) - len(kept),
            visible(min(set(sizes) - set(kept))),
        )
    return kept


def _local_files(root: str, accepts: Callable[[str], bool]) -> Listing:
    """Return the accepted files below a folder with their bytes.

    Linked folders are followed; a file that several links lead to is listed once. A
    folder that several links lead to is listed under at most NAMES names, of which the
    globs may accept one: links in every folder of a chain make 2^n names.
    """
    sizes: dict[str, int] = {}
    listed: set[str] = set()
    odd: list[str] = []
    visits: Counter[str] = Counter()

    def visit(folder: str, parents: frozenset[str]) -> None:
        real = os.path.realpath(folder)
        if real in parents or visits[real] == NAMES:  # a link back, or many links
            return
        visits[real] += 1
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            name = os.path.relpath(entry.path, root)
            target = os.path.join(real, entry.name)
            if os.path.isdir(entry.path):  # False for a link to itself
                visit(entry.path, parents | {real})
            elif target not in listed and accepts(name):
                listed.add(target)
                if os.path.isfile(entry.path):
                    sizes[name] = os.stat(entry.path).st_size
                else:
                    odd.append(name)

    visit(root, frozenset())
    return Listing(sizes, tuple(odd))


def _hub_files(data: DataConfig, accepts: Callable[[str], bool]) -> tuple[str, Listing]:
    """Return the address of a dataset's newest commit, and its files with their bytes.

    Sign-in is the hub's own (HF_TOKEN, or `hf auth login`).
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    name = data.path
    try:
        commit = api.dataset_info(name).sha
        tree = api.list_repo_tree(
            name, repo_type="dataset", revision=commit, recursive=True
        )
        files = [entry for entry in tree if isinstance(entry, RepoFile)]
        configs = {}
        if CARD in {file.path for file in files}:
            card = api.hf_hub_download(name, CARD, repo_type="dataset", revision=commit)
            configs = card_configs(Path(card))
    except Exception as error:  # of the library or of its HTTP client
        raise UserError(
            f"data.path={name} must be a file, a folder or a dataset on the hub, got no "
            f"such path, and {hub_refusal(error, 'dataset')}",
            page=HUB,
        ) from error
    globs, split = config_globs(data, configs)
    sizes = {
        file.path: file.size
        for file in files
        if accepts(file.path)
        and (globs is None or any(glob.match(file.path) for glob in globs))
    }
    address = f"{REMOTE}datasets/{name}@{commit}"
    return address, Listing(sizes, split=split)


def card_configs(card: Path) -> dict[str, list[tuple[str, str]]]:
    """Return the configurations of a dataset card: splits with globs of their files.

    The split is "" where the card names none.
    """
    from huggingface_hub import DatasetCard

    listed = DatasetCard.load(card, ignore_metadata_errors=True).data.get("configs")
    configs: dict[str, list[tuple[str, str]]] = {}
    for config in listed or []:
        files = config.get("data_files") or "**"
        folder = f"{config['data_dir']}/" if config.get("data_dir") else ""
        entries = []
        for entry in files if isinstance(files, list) else [files]:
            entry = entry if isinstance(entry, dict) else {"path": entry}
            paths = (
                entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
            )
            split = str(entry.get("split", ""))
            entries += [(split, f"{folder}{path}") for path in paths]
        configs[str(config.get("config_name"))] = entries
    return configs


def config_globs(
    data: DataConfig, configs: Mapping[str, list[tuple[str, str]]]
) -> tuple[list[re.Pattern[str]] | None, bool]:
    """Return globs of the files of data.config, None for all, and whether of data.split.

    Raises UserError for a configuration that the card does not have, and for several.
    """
    from fsspec.utils import glob_translate

    if not configs:
        if data.config is None:
            return None, False
        configs = {data.config: [("", f"{data.config}/**")]}
    only = min(configs) if len(configs) == 1 else "default"
    config = data.config or only
    if config not in configs:
        if data.config is None and data.include != ["**/*"]:
            return None, False
        raise UserError(
            f"data.config must be one of {', '.join(sorted(configs))} for data.path="
            f"{data.path}, got {data.config}. Give one"
        )
    globs = [
        re.compile(glob_translate(glob))
        for split, glob in configs[config]
        if not split or (split == data.split if data.split else split not in TEST)
    ]
    return globs, all(split for split, _ in configs[config])


def read(part: InputPart, place: str, data: DataConfig) -> Iterator[Document | Drop]:
    """Yield every row of a part, in order.

    A damaged file is read up to its damage. Raises UserError for a file that the machine
    or the hub does not give: it must not be counted as a damaged one.
    """
    for name in part.odd:
        yield Drop(NO_FILE, name)
    for file in part.files:
        reader = _read_source if data.kind == "source" else READERS[form_of(file)]
        try:
            yield from reader(f"{place}/{file}", file, data)
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
    with _open(path) as stream:
        present = read_schema(stream).names
    names = _columns(data)
    if missing := [name for name in names if name not in present]:
        yield Drop("missing column", file, detail=_lacking(missing, present))
        return
    if data.messages:
        further = {data.messages, *COLUMNS, *BESIDE, "ends"}
        names += [name for name in present if name in further and name not in names]
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
    row = 0
    for table in rows.with_format("arrow").iter(BATCH_ROWS):
        columns = [_as_bytes(table[name].combine_chunks()) for name in names]
        for values in zip(*columns, strict=True):
            try:
                row_columns = {name: v.as_py() for name, v in zip(names, values)}
            except (ValueError, OverflowError) as error:  # a date out of range
                yield _drop_for(error, file, row)
            else:
                yield _row(row_columns, file, row, data)
            row += 1


def _as_bytes(column: pa.Array) -> pa.Array:
    """Return a column with its text as bytes: a string column may hold no UTF-8."""
    if pa.types.is_string(column.type):
        return column.view(pa.binary())
    if pa.types.is_large_string(column.type):
        return column.view(pa.large_binary())
    return column


def _read_text(path: str, file: str, data: DataConfig) -> Iterator[Document | Drop]:
    """Read JSON or CSV, compressed or not, by the file's suffix and its first line."""
    limit = 6 * data.max_bytes + 65536  # JSON may spell a character in six
    with _open(path) as raw:
        stream: Any = raw
        if decompress := DECOMPRESSORS.get(Path(file).suffix):
            if not raw.peek(1):
                raise EOFError("an archive of no bytes")
            stream = io.BufferedReader(decompress(raw))
        if form_of(file) in (".csv", ".tsv"):
            yield from _csv_rows(stream, file, data, limit)
            return
        start = stream.peek(1).lstrip(b"\xef\xbb\xbf \t\r\n")
        if spans_lines(start.partition(b"\n")[0]):
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
    """Read a JSON list or indented objects, up to the first damage."""
    # Bytes that are no UTF-8 become halves of surrogate pairs, which _row refuses.
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    row = 0
    try:
        for columns in json_values(text, limit):
            yield _row(columns, file, row, data)
            row += 1
    except (ValueError, RecursionError) as error:
        rest = f"{error}: the rest of the file is not read"
        yield Drop("malformed row", file, row, detail=rest[:200])


def _csv_rows(
    stream: Any, file: str, data: DataConfig, limit: int
) -> Iterator[Document | Drop]:
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(limit)
    rows = iter(read_csv(text, file))
    row = 0
    while True:
        try:
            columns = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield _drop_for(ValueError(error), file, row)
        else:
            if None in columns:
                detail = "more fields than the first line names"
                yield Drop("malformed row", file, row, detail=detail)
            else:
                yield _row(columns, file, row, data)
        row += 1


# Of files of rows, by suffix.
READERS = dict.fromkeys(ROW_FILES, _read_text) | {".parquet": _read_parquet}


def _row(columns: Any, file: str, row: int, data: DataConfig) -> Document | Drop:
    """Return a row of any file of rows as a document, or as a Drop."""
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
    """Return a row as a document. Raises ValueError or RecursionError for odd values."""
    if missing := [name for name in _columns(data) if columns.get(name) is None]:
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
    key = "/".join(_text(columns[name]) for name in data.id)
    id = f"{language}/{key}" if key else f"{file}:{row}"
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
    """Return the columns that every row must have; a conversation has several forms."""
    names = [None if data.messages else data.text, *data.id, data.language]
    return list(dict.fromkeys(filter(None, names)))


def _lacking(missing: list[str], present: list[str]) -> str:
    return f"no {', '.join(missing)}, got {', '.join(map(str, present))}"[:200]


def _conversation(columns: Mapping[str, Any], name: str) -> tuple[Message, ...]:
    """Return a row's messages. Raises ValueError unless an answer follows others."""
    messages = conversation(columns, name)
    if all(message["role"] != "assistant" for message in messages[1:]):
        raise ValueError("must have an answer of the assistant after another message")
    return tuple(messages)


def _drop_for(error: Exception, file: str, row: int) -> Drop:
    reason = "undecodable" if isinstance(error, UnicodeError) else "malformed row"
    return Drop(reason, file, row, detail=str(error)[:200])


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
