"""Files that are there whole, or as they were before. Knows nothing of what is in them, nor of stages."""

import fcntl
import json
import os
import platform
import resource
import shutil
import stat
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

from conf.errors import UserError, in_one_line

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def file_to_write(setting: str, name: str | None) -> Path | None:
    """Return the path of a file to write. Raises UserError where it cannot be written."""
    if not name:
        return None
    path, target = Path(name), Path(os.path.realpath(name))
    if path.is_dir() or not target.parent.is_dir():
        reason = "a folder" if path.is_dir() else f"no {target.parent}"
        raise UserError(f"{setting}={path} must be a file in a folder that exists, got {reason}")
    _check_regular(path, f"{setting}={path}")
    if target.exists() and is_mount_point(target):
        raise UserError(
            f"{setting}={path}: must be a file that can be replaced, got a mount point. "
            "Mount its folder instead."
        )
    temporary = target.with_name(f"{_begun(target)}{os.urandom(6).hex()}")
    try:
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise UserError(
            f"{setting}={path} must be in a folder that can be written, got {error.strerror} for {temporary}"
        ) from error
    return path


def is_mount_point(path: Path) -> bool:
    """Whether something is mounted at an absolute path without links, also what `docker -v` binds there from
    the same file system.
    """
    import psutil  # late: 40 ms

    return os.path.ismount(path) or str(path) in {
        partition.mountpoint for partition in psutil.disk_partitions(all=True)
    }


def allow_many_files() -> None:
    """Let this process open as many files at once as the system permits, where a shell permits it fewer."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def read_json(path: Path, expected: str = "a JSON object") -> dict[str, Any]:
    """Read a JSON object. Raises UserError for any other file, which says what was `expected`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} must be {expected}, got {in_one_line(error)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must be {expected}, got {type(value).__name__}")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write JSON as `write_bytes` does."""
    try:
        text = json.dumps(value, indent=1, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a pair, such as a file's name that is no UTF-8 is read as
        text = json.dumps(value, indent=1).encode()
    write_bytes(path, text + b"\n")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part. What writers of it that were
    killed on this machine have left is removed. A link stays: its target is written.

    Raises OSError that names the file, and leaves nothing else, where it cannot be written, and UserError for a
    device, a pipe and anything else that is no regular file.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    _check_regular(path, str(path))
    begun = _begun(target)
    for left in target.parent.glob(f"{escape(begun)}*"):
        _remove_unless_locked(left)
    temporary = target.with_name(f"{begun}{os.urandom(6).hex()}")
    try:
        held = _create_locked(temporary)
        try:
            temporary.write_bytes(content)
            if target.exists():
                shutil.copymode(target, temporary)  # who may read the old one may read the new one
            os.replace(temporary, target)
        finally:
            os.close(held)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _begun(target: Path) -> str:
    """How the names of the files begin that are written before they replace `target`."""
    return f".{target.name}.{platform.node()}."


def _check_regular(path: Path, name: str) -> None:
    """Raise UserError, in the name that the user knows, for what is there and is no regular file. Links are
    followed by the system: of `/dev/stdout`, a pipe, `realpath` makes a name that nothing has.
    """
    if path.exists() and not path.is_file():
        kind = KINDS.get(stat.S_IFMT(path.stat().st_mode), "a special file")
        raise UserError(f"{name}: must be a regular file or a new one, got {kind}. Give another file.")


def _create_locked(path: Path) -> int:
    """Return a descriptor that locks a new file until it is closed, or the process dies.

    A process's number does not say whether it lives: containers that share a folder and a host's name have
    their own numbers.
    """
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: there _remove_unless_locked removes nothing
            return descriptor
        if path.exists():
            return descriptor
        os.close(descriptor)  # another writer removed it before it was locked


def _remove_unless_locked(path: Path) -> None:
    """Remove a file that no living writer holds."""
    with suppress(OSError):  # it is locked, gone or another user's, or the file system has no locks
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(descriptor)
