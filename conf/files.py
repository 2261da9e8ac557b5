"""Files that are there whole, or as they were before; JSON with its checksum, {"crc32": of all the rest, ...}.

Knows nothing of what is in them, nor of stages.
"""

import fcntl
import json
import os
import platform
import resource
import shutil
import stat
import zlib
from collections.abc import Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

from conf.errors import UserError, in_one_line

CHECKSUM = "crc32"
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def file_to_write(setting: str, name: str | None) -> Path | None:
    """Return the single file that a setting asks for.

    Raises UserError, before anything is done for it, where it has no place.
    """
    if not name:
        return None
    path = Path(name)
    target = Path(os.path.realpath(name))
    start = f"{setting}={path} must be a file"
    if path.is_dir() or not target.parent.is_dir():
        got = "a folder" if path.is_dir() else f"no {target.parent}"
        raise UserError(
            f"{start} in a folder that exists, got {got}. Create the folder, or give another file."
        )
    _check_regular(path, f"{setting}={path}")
    if target.exists() and is_mount_point(target):
        raise UserError(
            f"{start} that can be replaced, got a mount point. Mount its folder instead."
        )
    temporary = _temporary(target, os.urandom(6).hex())
    try:
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise UserError(
            f"{start} in a folder that can be written, got '{error.strerror}' for {temporary}. Give another "
            "file."
        ) from error
    return path


def is_mount_point(path: Path) -> bool:
    """Return whether something is mounted at an absolute path without links.

    Also what `docker -v` binds there from the same file system.
    """
    import psutil  # late: 40 ms

    mounts = {partition.mountpoint for partition in psutil.disk_partitions(all=True)}
    return os.path.ismount(path) or str(path) in mounts


def allow_many_files() -> None:
    """Let this process open as many files at once as the system permits, where a shell permits it fewer."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def read_json(path: Path, expected: str = "a JSON object") -> dict[str, Any]:
    """Return a JSON object. Raises UserError for any other file, which must be what is `expected`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} must be {expected}, got {in_one_line(error)}"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must be {expected}, got {type(value).__name__}")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write JSON as `write_bytes` does."""
    try:
        text = json.dumps(value, indent=1, ensure_ascii=False).encode()
    except (
        UnicodeEncodeError
    ):  # half of a pair, such as a file's name that is no UTF-8 is read as
        text = json.dumps(value, indent=1).encode()
    write_bytes(path, text + b"\n")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part.

    What writers of it that were killed on this machine have left is removed. A link stays: its target is
    written. Raises OSError that names the file, and leaves nothing else, where it cannot be written, and
    UserError for a device, a pipe and anything else that is no regular file.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    _check_regular(path, str(path))
    for left in target.parent.glob(f"{escape(_temporary(target, '').name)}*"):
        _remove_unless_locked(left)
    temporary = _temporary(target, os.urandom(6).hex())
    try:
        descriptor = _create_locked(temporary)
        try:
            temporary.write_bytes(content)
            if target.exists():
                shutil.copymode(
                    target, temporary
                )  # who may read the old one may read the new one
            os.replace(temporary, target)
        finally:
            os.close(descriptor)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _temporary(target: Path, unique: str) -> Path:
    """Return a file that is written before it replaces `target`."""
    return target.with_name(f".{target.name}.{platform.node()}.{unique}")


def _check_regular(path: Path, name: str) -> None:
    """Raise UserError for what is there and is no regular file; links are followed by the system alone."""
    if path.exists() and not path.is_file():
        kind = KINDS.get(stat.S_IFMT(path.stat().st_mode), "a special file")
        raise UserError(
            f"{name} must be a regular file or a new one, got {kind}. Give another file."
        )


def _create_locked(path: Path) -> int:
    """Create a file; return a descriptor that locks it until it is closed, or the process dies.

    A process's number does not say whether it lives: containers that share a folder and a host's name have
    their own numbers.
    """
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except (
            OSError
        ):  # a file system without locks: there _remove_unless_locked removes nothing
            return descriptor
        if path.exists():
            return descriptor
        os.close(descriptor)  # another writer removed it before it was locked


def _remove_unless_locked(path: Path) -> None:
    with suppress(
        OSError
    ):  # it is locked, gone or another user's, or the file system has no locks
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(descriptor)


class Corrupt(Exception):
    """What is wrong with a file, as the end of a sentence."""


def with_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is to be written, with its checksum. Raises ValueError for what has one already."""
    if CHECKSUM in value:
        raise ValueError(f"{CHECKSUM} must be no key of the value")
    return {CHECKSUM: _checksum(json.loads(json.dumps(value))), **value}


def read_checksummed(path: Path) -> dict[str, Any]:
    """Read what was written, without the checksum. Raises Corrupt for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        intact = value.pop(CHECKSUM) == _checksum(value)
    except (
        OSError,
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
        RecursionError,
    ) as error:
        raise Corrupt("cannot be read") from error
    if not intact:
        raise Corrupt("has another checksum")
    return value


def load_checksummed(path: Path, remedy: str) -> dict[str, Any]:
    """Read the same, for a user. Raises UserError, with what can be done."""
    try:
        return read_checksummed(path)
    except Corrupt as error:
        raise UserError(
            f"{path} must be whole, got a file that {error}: {remedy}"
        ) from error


def read_result(path: Path) -> dict[str, Any]:
    """Read what a stage has written; earlier versions did without a checksum.

    Raises UserError for what is no JSON object, and for one that was changed since.
    """
    value = read_json(path)
    if CHECKSUM in value and value.pop(CHECKSUM) != _checksum(value):
        raise UserError(
            f"{path} must be as it was written, got it changed since. Copy it anew, or make it again"
        )
    return value


def _checksum(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
