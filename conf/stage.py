"""The folder of a stage: locked, unfinished until its manifest is written, resumable.

A manifest says what made the folder (kind, settings, inputs, versions, commit) and what is in it. A folder
without one is unfinished and nobody reads it. Knows nothing of what the stages do.
"""

import errno
import fcntl
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from conf.errors import ANOTHER, UNFINISHED, UserError
from conf.files import read_result, with_checksum, write_json
from conf.fingerprint import MANIFEST, fingerprint

BEGUN = "begun.json"
SCHEMA = 1
PACKAGES = ("torch", "transformers", "deepspeed", "tokenizers", "numpy")
ROOT = Path(__file__).parent.parent  # the folder that the project's packages lie in


def read_manifest(folder: str | Path, kind: str, setting: str) -> dict[str, Any]:
    """Return the manifest of a finished folder of this `kind`.

    `setting` gave the folder. Raises UserError for any other folder.
    """
    path = Path(folder) / MANIFEST
    if path.is_file():
        manifest = read_result(path)
        if manifest.get("kind") == kind:
            return manifest
        got = f"kind '{manifest.get('kind')}'. Give another folder"
    elif path.parent.is_dir():
        got = f"no {MANIFEST} in it. Finish it by the command that makes it"
        if kind == "shards":
            got += f": python -m data_prep data.path={folder} out=DATA"
    elif path.parent.is_file():
        got = "a file. Give the folder that is made of it"
        if kind == "shards":
            got += f" by python -m data_prep data.path={folder} out=DATA"
    else:
        got = "no such folder. Check the path"
    raise UserError(
        f"{setting}={folder} must be a finished folder of kind '{kind}', got {got}",
        page=UNFINISHED if path.parent.is_dir() else None,
    )


def made_from(
    settings: Any, inputs: Mapping[str, str | Path], ignore: Iterable[str] = ()
) -> dict[str, Any]:
    """Return what determines a stage's result: its settings, less the ignored ones, and its inputs.

    `inputs` are finished folders and model directories by the setting that names them ("data.path"): their
    fingerprint counts, not where they lie.
    """
    counted = {
        name: value
        for name, value in asdict(settings).items()
        if name not in {"out", *ignore}
    }
    for name in inputs:
        *groups, last = name.split(".")
        place = counted
        for group in groups:
            place = place[group]
        del place[last]
    return {
        "settings": json.loads(json.dumps(counted)),
        "inputs": {name: fingerprint(folder) for name, folder in inputs.items()},
    }


def existing(named: Mapping[str, str | None]) -> dict[str, str]:
    """Return the model directories among settings' values, by setting: the inputs of `made_from`.

    What is none stays a setting, which whoever reads it refuses.
    """
    return {
        name: folder
        for name, folder in named.items()
        if folder and (Path(folder) / "config.json").is_file()
    }


def is_finished(out: str | Path, kind: str, facts: Mapping[str, Any]) -> bool:
    """Return whether `out` already holds this very result.

    Raises UserError when it holds a finished result of other settings or other inputs, or can be no folder.
    """
    check_place(out)
    path = Path(out) / MANIFEST
    if not path.is_file():
        return False
    check_same(read_result(path), {"kind": kind, **facts}, out)
    with suppress(OSError):  # of a run that was killed as it made the folder visible
        path.with_name(BEGUN).unlink(missing_ok=True)
    return True


def check_same(
    recorded: Mapping[str, Any],
    requested: Mapping[str, Any],
    out: str | Path,
    *,
    finished: bool = True,
) -> None:
    """Raise UserError, naming the first difference, when `out` was made, or begun, with something else."""
    for name, value, other in _differences(requested, recorded):
        contents = "a result" if finished else "an unfinished run"
        raise UserError(
            f"out={out}: already contains {contents} with {name}={other}; requested {name}={value}. "
            "Use another out=, or delete the folder",
            page=ANOTHER,
        )


def _differences(
    value: Any, other: Any, name: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        for key in value:
            yield from _differences(
                value[key], other.get(key), f"{name}.{key}".lstrip(".")
            )
    elif value != other:
        yield name.removeprefix("settings."), value, other


@contextmanager
def staged(out: str | Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `out`, whole, when the block ends well, else is removed.

    Raises UserError when `out` holds anything already, or another run is writing it. A folder that is whole and
    cannot become `out` is kept.
    """
    with begun(out) as partial:
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        publish(partial)


@contextmanager
def begun(out: str | Path, facts: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Yield the folder that `publish` is to make `out`, locked against other runs while the block lasts.

    The work of an interrupted run is kept; a UserError before any work leaves no folder. Raises UserError as
    `staged` does, and where the interrupted run was begun with other facts.
    """
    check_place(out)
    _check_empty(out)
    if os.path.ismount(os.path.realpath(out)):  # which no rename can replace
        raise UserError(
            f"out={out} must be no mount point. Use a folder in it, such as out={out}/out"
        )
    partial = partial_of(out)
    created = create_folder(partial, out)
    descriptor = lock(partial, out)
    record = partial / BEGUN
    try:
        _check_empty(out)  # a run that ended just now made it
        if facts is not None and record.is_file() and len(list(partial.iterdir())) > 1:
            check_same(read_result(record), facts, partial, finished=False)
        else:
            for path in partial.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if facts is not None:
            write_json(record, with_checksum(facts))
        yield partial
    except UserError:
        if partial.is_dir() and list(partial.iterdir()) == [
            record
        ]:  # refused before any work
            record.unlink()
            remove_empty([partial])
        remove_empty(created)
        raise
    finally:
        os.close(descriptor)


def check_out(out: str | Path) -> None:
    """Raise UserError for what neither holds a finished result nor could become one.

    For a stage that must look long at its inputs before it can ask `is_finished`.
    """
    check_place(out)
    if not (Path(out) / MANIFEST).is_file():
        _check_empty(out)


def create_folder(path: Path, out: str | Path) -> list[Path]:
    """Create a folder with its parents; return those that were not there, innermost first.

    Raises UserError, naming `out`, where the system refuses.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out={out} must be a folder that can be created, got '{error.strerror}'. Use another out="
        ) from error
    return missing


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove these folders, given innermost first, as far as they are empty."""
    with suppress(OSError):  # something is in it
        for folder in folders:
            if folder.exists():
                folder.rmdir()


def check_place(out: str | Path) -> None:
    """Raise UserError for a path without a name, or with a file in its place or above."""
    path = Path(out)
    existing = next(place for place in (path, *path.parents) if place.exists())
    nameless = path.name in ("", "..")
    got = "no name" if nameless else f"the file {existing}"
    if nameless or not existing.is_dir():
        raise UserError(
            f"out={out} must be a new or empty folder with a name, got {got}. Use another out="
        )


def _check_empty(out: str | Path) -> None:
    """Raise UserError where a folder holds anything."""
    final = Path(out)
    if final.exists() and any(final.iterdir()):
        raise UserError(
            f"out={out} must be a new or empty folder, got other files there. Use another out="
        )


def partial_of(out: str | Path) -> Path:
    """Return the folder that is to become `out`, while it is written: beside it, where a rename makes it
    visible.

    A link is followed: its target becomes the result.
    """
    final = Path(os.path.realpath(out))
    return final.with_name(f".{final.name}.partial")


def publish(partial: Path) -> Path:
    """Make a folder that was begun visible under its own name, which is returned.

    Raises UserError, which names the whole result, where that cannot be done.
    """
    for path in partial.glob(".*"):
        if path.is_file():  # left by a writer of JSON that was killed
            path.unlink()
    final = partial.with_name(partial.name[1:].removesuffix(".partial"))
    try:
        _check_empty(final)
        if final.exists():
            final.rmdir()
        os.replace(partial, final)
    except (OSError, UserError) as error:
        reason = error.strerror if isinstance(error, OSError) else "other files in it"
        raise UserError(
            f"out={final} must be an empty folder that can be replaced, got {reason}. "
            f"The result is whole in {partial}: move it to another place."
        ) from error
    (final / BEGUN).unlink(missing_ok=True)
    return final


def lock(folder: Path, out: str | Path) -> int:
    """Return a descriptor that keeps other runs from `folder` until it is closed.

    The lock ends with the process. It binds runs of this machine: on NFS a folder's lock
    reaches no other, and some file systems have none. Raises UserError, naming `out`, if
    another run has the lock, or has renamed or removed the folder.
    """
    descriptor = -1
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        busy = not os.path.samestat(os.fstat(descriptor), os.stat(folder))
    except (BlockingIOError, FileNotFoundError):
        busy = True
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        busy = False
    if busy:
        if descriptor >= 0:
            os.close(descriptor)
        raise UserError(
            f"out={out}: another run is writing it. Wait for it", page=UNFINISHED
        )
    return descriptor


def write_manifest(
    out: str | Path, kind: str, origin: Mapping[str, Any], **facts: Any
) -> None:
    """Write the manifest atomically: the last act of a stage."""
    import psutil

    value = {
        "schema": SCHEMA,
        "kind": kind,
        **origin,
        **facts,
        "versions": versions(),
        "commit": commit(),
        "seconds": round(
            time.time() - psutil.Process().create_time(), 1
        ),  # of this process
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_json(Path(out) / MANIFEST, with_checksum(value))


def versions() -> dict[str, str]:
    """Return Python's and the main packages' versions."""
    numbers = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            numbers[name] = metadata.version(name)
    return numbers


def commit() -> str:
    """Return the project's git commit, or "unknown" outside a checkout, or without git."""
    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"


def processor() -> str:
    """Return the name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
