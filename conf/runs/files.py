"""Write files atomically; read and write JSON with a checksum.

A checksummed file is a JSON object with the key "crc32", the CRC-32 of all other keys.
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
    """Raised if a checksummed file is missing or damaged.

    Its message is the end of a sentence that the caller begins with the file's name.
    """


def allow_many_files() -> None:
    """Raise this process's limit of open files to the system's maximum."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def check_regular(folder: Path, setting: str, folders: Iterable[str] = ()) -> None:
    """Raise UserError for FIFOs, sockets, devices and broken links in a model's folder.

    `folders` are names of subfolders to check too. Opening a FIFO would block forever, and a
    model file with a broken link would be taken for missing. Broken links to other files,
    which remain in the hub's cache after a clean-up, are allowed.
    """
    for place in (folder, *(folder / name for name in folders)):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.is_file() or path.is_dir():
                continue
            if path.exists() or path.suffix in PARTS:
                kind = "a FIFO or device" if path.exists() else "a broken link"
                raise UserError(
                    f"{setting}={folder} must contain files and folders, got {path}, {kind}. Remove it"
                )


def read_json(path: Path, expected: str = "a JSON object") -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises UserError for any other file; `expected` says in the message what it must be.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError("a folder, FIFO or device")  # opening a FIFO would block
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(json.dumps(value)[:80])
        return value
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} must be {expected}, got {in_one_line(error)}"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically (see `write_bytes`)."""
    try:
        text = json.dumps(value, indent=1, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate, for example in a file name
        text = json.dumps(value, indent=1).encode()
    write_bytes(path, text + b"\n")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old content or the new, never a part.

    If `path` is a symbolic link, its target is written. Raises OSError with the file's name if
    writing fails, and removes its temporary file. A killed writer leaves a hidden file.
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
    """Return the value with its checksum added."""
    assert CHECKSUM not in value
    return {CHECKSUM: _checksum(json.loads(json.dumps(value))), **value}


def read_checksummed(path: Path) -> dict[str, Any]:
    """Return the value in a checksummed file. Raises Corrupt if it is missing or damaged."""
    try:
        value = read_json(path)
    except UserError as error:
        raise Corrupt("cannot be read") from error
    if value.pop(CHECKSUM, None) != _checksum(value):
        raise Corrupt("has a checksum mismatch")
    return value


def read_result(path: Path) -> dict[str, Any]:
    """Return the value in a file that a stage has written, without its checksum.

    Files of earlier versions have no checksum. Raises UserError for a file that is no JSON object, or was
    changed after it was written.
    """
    value = read_json(path)
    if CHECKSUM in value and value.pop(CHECKSUM) != _checksum(value):
        raise UserError(
            f"{path}: checksum mismatch: the file was edited or damaged. Restore it, or rerun its stage"
        )
    return value


def _checksum(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
