"""Files that are there whole, or as they were before; JSON with its checksum.

A checksummed file is {"crc32": of all the rest, ...}.
"""

import json
import os
import resource
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from conf.errors import UserError, in_one_line

CHECKSUM = "crc32"
PARTS = (".json", ".jinja", ".model", ".safetensors")  # suffixes of a model's files


class Corrupt(Exception):
    """A checksummed file is absent or damaged; the message ends a sentence."""


def allow_many_files() -> None:
    """Let this process open as many files at once as the system permits."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def check_regular(folder: Path, setting: str, folders: Iterable[str] = ()) -> None:
    """Raise UserError for FIFOs, sockets, devices and broken links in a folder.

    `folders` are names of folders in it that are read too. Opening a FIFO waits for ever,
    and a broken link to a part would be taken for a part that is not there. Broken links
    to other files, such as a hub's cache has after a clean-up, do no harm.
    """
    for place in (folder, *(folder / name for name in folders)):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.is_file() or path.is_dir():
                continue
            if path.exists() or path.suffix in PARTS:
                kind = "no regular file" if path.exists() else "a broken link"
                raise UserError(
                    f"{setting}={folder} must contain files and folders, got {path}, {kind}. Remove it"
                )


def read_json(path: Path, expected: str = "a JSON object") -> dict[str, Any]:
    """Return a JSON object. Raises UserError for a file that is not what is `expected`."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("no regular file")  # opening a FIFO would wait for ever
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} must be {expected}, got {in_one_line(error)}"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Write JSON as `write_bytes` does."""
    try:
        text = json.dumps(value, indent=1, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as in a file's name
        text = json.dumps(value, indent=1).encode()
    write_bytes(path, text + b"\n")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part.

    A link stays: its target is written. Raises OSError that names the file, and leaves
    nothing else, where it cannot be written. A writer that is killed leaves a hidden file.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.urandom(6).hex()}")
    try:
        temporary.write_bytes(content)
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def with_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value to write, with its checksum."""
    assert CHECKSUM not in value
    return {CHECKSUM: _checksum(json.loads(json.dumps(value))), **value}


def read_checksummed(path: Path) -> dict[str, Any]:
    """Return a checksummed file's value. Raises Corrupt for anything else."""
    try:
        value = read_json(path)
    except UserError as error:
        raise Corrupt("cannot be read") from error
    if value.pop(CHECKSUM, None) != _checksum(value):
        raise Corrupt("has another checksum")
    return value


def read_result(path: Path) -> dict[str, Any]:
    """Return the value that a stage has written; earlier versions wrote no checksum.

    Raises UserError for a file that is no JSON object, or was changed since.
    """
    value = read_json(path)
    if CHECKSUM in value and value.pop(CHECKSUM) != _checksum(value):
        raise UserError(
            f"{path} must be as it was written, got it changed since. Copy it anew, or make it again"
        )
    return value


def _checksum(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
