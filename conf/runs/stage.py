"""Output folders of stages: locking, resuming, and the manifest.

The manifest is written last. It records how the folder was made (kind, settings, inputs, versions, commit) and
its contents. A folder without a manifest is unfinished, and no other stage reads it. This module is independent
of the stages' contents.
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
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from conf.errors import ANOTHER, UNFINISHED, UserError
from conf.runs.files import read_result, with_checksum, write_json
from conf.runs.fingerprint import MANIFEST, fingerprint

RUN_RECORD = "begun.json"  # settings and inputs of an unfinished run, in its folder
SCHEMA = 1
PACKAGES = ("torch", "transformers", "deepspeed", "tokenizers", "numpy")
ROOT = Path(__file__).parents[2]  # the folder that contains the project's packages


def read_manifest(folder: str | Path, kind: str, setting: str) -> dict[str, Any]:
    """Return the manifest of a finished folder of this `kind`.

    Raises UserError, naming `setting`, if the folder is unfinished, missing or of another kind.
    """
    path = Path(folder) / MANIFEST
    if path.is_file():
        manifest = read_result(path)
        if manifest.get("kind") == kind:
            return manifest
        got = f"kind '{manifest.get('kind')}'. Give another folder"
    elif path.parent.is_dir():
        got = f"no {MANIFEST} in it. Finish it with the command that makes it"
        if kind == "shards":
            got += f": python -m data_prep data.path={folder} out=DATA"
    elif path.parent.is_file():
        got = "a file. Give the folder that is made from it"
        if kind == "shards":
            got += f" by python -m data_prep data.path={folder} out=DATA"
    else:
        got = "no such folder. Check the path"
    raise UserError(
        f"{setting}={folder} must be a finished folder of kind '{kind}', got {got}",
        page=UNFINISHED if path.parent.is_dir() else None,
    )


def collect_provenance(
    settings: Any, inputs: Mapping[str, str | Path], ignore: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the settings and the fingerprints of the inputs that determine a stage's result.

    Settings in `ignore` and `out` are left out. `inputs` maps settings such as "data.path", or
    "reports[0]" of a list, to finished folders or model directories; their fingerprints replace the paths.
    """
    counted = {
        name: value
        for name, value in asdict(settings).items()
        if name not in {"out", *ignore}
    }
    for name in inputs:
        *groups, last = name.split(".")
        node = counted
        for group in groups:
            node = node[group]
        node.pop(last.partition("[")[0], None)  # once for all members of a list
    return {
        "settings": json.loads(json.dumps(counted)),
        "inputs": {name: fingerprint(folder) for name, folder in inputs.items()},
    }


def model_directories(named: Mapping[str, str | None]) -> dict[str, str]:
    """Return the settings with values that are model directories, as inputs of `collect_provenance`.

    Other values are skipped; the loader of the model reports them.
    """
    return {
        name: folder
        for name, folder in named.items()
        if folder and (Path(folder) / "config.json").is_file()
    }


def is_finished(out: str | Path, kind: str, facts: Mapping[str, Any]) -> bool:
    """Return whether `out` already contains the result for these facts. Raises as `read_finished`."""
    return read_finished(out, kind, facts) is not None


def read_finished(
    out: str | Path, kind: str, facts: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the manifest of `out` if it already contains the result for these facts, else None.

    Raises UserError if it contains a finished result for other facts, or cannot be a folder.
    """
    check_path(out)
    path = Path(out) / MANIFEST
    if not path.is_file():
        return None
    manifest = read_result(path)
    check_same(manifest, {"kind": kind, **facts}, out)
    with suppress(
        OSError
    ):  # left by a run that was killed while it published the folder
        path.with_name(RUN_RECORD).unlink(missing_ok=True)
    return manifest


def check_same(
    recorded: Mapping[str, Any],
    requested: Mapping[str, Any],
    out: str | Path,
    *,
    finished: bool = True,
) -> None:
    """Raise UserError, naming the first difference, if `out` was made or begun with other facts.

    A setting that only the record has is of an earlier version, and is allowed. An input that only the record
    has was left out of the request, and is a difference.
    """
    inputs = recorded.get("inputs", {})
    left_out = dict.fromkeys(inputs.keys() - requested.get("inputs", {}).keys())
    for name, value, other in [
        *_differences(requested, recorded),
        *_differences(left_out, inputs, "inputs"),
    ]:
        contents = "a result" if finished else "an unfinished run"
        # A folder of another kind may be an input of this stage, which must not be deleted.
        remedy = "" if name == "kind" else ", or delete the folder"
        raise UserError(
            f"out={out}: already contains {contents} with {name}={other}; requested {name}={value}. "
            f"Use another out={remedy}",
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
def atomic_folder(out: str | Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `out` when the block ends, or removed if it raises.

    Raises UserError if `out` is not empty, or another run is writing it. If the complete folder cannot be
    renamed, it is kept.
    """
    with start_run(out) as partial:
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        publish(partial)


@contextmanager
def start_run(
    out: str | Path, facts: Mapping[str, Any] | None = None
) -> Iterator[Path]:
    """Yield the unfinished folder of `out`, locked against other runs during the block; `publish` renames it.

    If an interrupted run with the same `facts` left files, they are kept. A UserError before any work leaves no
    folder. Raises UserError if `out` is not empty, if another run is writing it, and if the interrupted run had
    other facts.
    """
    check_path(out)
    check_empty(out)
    if os.path.ismount(os.path.realpath(out)):  # a rename cannot replace it
        raise UserError(
            f"out={out} must not be a mount point. Use a folder in it, such as out={out}/out"
        )
    partial = partial_of(out)
    created = create_folder(partial, out)
    descriptor = lock(partial, out)
    record = partial / RUN_RECORD
    try:
        check_empty(out)  # again: another run may just have finished
        if facts is not None and record.is_file() and len(list(partial.iterdir())) > 1:
            check_same(read_result(record), facts, partial, finished=False)
        else:
            for path in partial.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if facts is not None:
            write_json(record, with_checksum(facts))
        yield partial
    except UserError:
        # No work was done yet.
        if partial.is_dir() and list(partial.iterdir()) == [record]:
            record.unlink()
            remove_empty([partial])
        remove_empty(created)
        raise
    finally:
        os.close(descriptor)


def check_out(out: str | Path) -> None:
    """Raise UserError if `out` contains files but no finished result, or cannot be a folder.

    For stages that need a long time to read their inputs before they can call `is_finished`.
    """
    check_path(out)
    if not (Path(out) / MANIFEST).is_file():
        check_empty(out)


def create_folder(path: Path, out: str | Path) -> list[Path]:
    """Create a folder and its parents; return the created folders, innermost first.

    Raises UserError, naming `out`, if the system refuses.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out={out} cannot be created: {error.strerror}. Use another out="
        ) from error
    return missing


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders, innermost first, up to the first that is not empty."""
    with suppress(OSError):  # the folder is not empty
        for folder in folders:
            if folder.exists():
                folder.rmdir()


def check_path(out: str | Path) -> None:
    """Raise UserError if a path has no name, or if it or one of its parents is a file."""
    path = Path(out)
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    nameless = path.name in ("", "..")
    got = "no name" if nameless else f"the file {existing}"
    if nameless or not existing.is_dir():
        raise UserError(
            f"out={out} must be a new or empty folder with a name, got {got}. Use another out="
        )


def check_empty(out: str | Path) -> None:
    """Raise UserError if the folder exists and is not empty."""
    final = Path(out)
    if final.exists() and any(final.iterdir()):
        raise UserError(
            f"out={out} must be a new or empty folder, got a folder with files. Use another out="
        )


def partial_of(out: str | Path) -> Path:
    """Return the temporary folder of `out`, in the same parent folder so that it can be renamed.

    If `out` is a symbolic link, its target becomes the result.
    """
    final = Path(os.path.realpath(out))
    return final.with_name(f".{final.name}.partial")


def reopen(out: str | Path, facts: Mapping[str, Any]) -> None:
    """Make a finished folder unfinished, with its files, so that a run with the same `facts` continues it."""
    final = Path(os.path.realpath(out))
    write_json(final / RUN_RECORD, with_checksum(facts))
    os.replace(final, partial_of(out))
    (partial_of(out) / MANIFEST).unlink()


def publish(partial: Path) -> Path:
    """Rename an unfinished folder to its final name; return the final path.

    Raises UserError, naming the folder with the complete result, if it cannot be renamed.
    """
    for path in partial.glob(".*"):
        if path.is_file():  # the temporary file of a killed `write_bytes`
            path.unlink()
    final = partial.with_name(partial.name[1:].removesuffix(".partial"))
    try:
        check_empty(final)
        if final.exists():
            final.rmdir()
        os.replace(partial, final)
    except (OSError, UserError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it contains files"
        raise UserError(
            f"out={final} cannot be replaced by the result: {reason}. The complete result is in "
            f"{partial}: move it to another path."
        ) from error
    (final / RUN_RECORD).unlink(missing_ok=True)
    return final


def lock(folder: Path, out: str | Path) -> int:
    """Lock `folder` against other runs; return a file descriptor that holds the lock until it is closed.

    The lock ends with the process. It works between processes of one machine: NFS does not share locks of
    folders between machines, and some file systems do not support locks. Raises UserError, naming `out`, if
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
            f"out={out}: another run is writing it. Wait until it ends", page=UNFINISHED
        )
    return descriptor


def write_manifest(
    out: str | Path, kind: str, origin: Mapping[str, Any], **facts: Any
) -> None:
    """Write the manifest atomically, as the last step of a stage."""
    import psutil

    value = {
        "schema": SCHEMA,
        "kind": kind,
        **origin,
        **facts,
        "versions": versions(),
        "commit": commit(),
        # Since this process started.
        "seconds": round(time.time() - psutil.Process().create_time(), 1),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_json(Path(out) / MANIFEST, with_checksum(value))


def versions() -> dict[str, str]:
    """Return the versions of Python and of the main packages."""
    numbers = {"python": platform.python_version()}
    return numbers | _package_versions()


@cache  # reading a package's metadata takes several milliseconds
def _package_versions() -> dict[str, str]:
    numbers = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            numbers[name] = metadata.version(name)
    return numbers


def commit() -> str:
    """Return the project's git commit, or "unknown" outside a checkout or without git."""
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
