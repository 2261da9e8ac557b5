"""One checkpoint: what checkpoint.json says of its folder, and whether all of it is whole.

Knows folders and checksums; needs no engine.
"""

import errno
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from conf import UserError
from conf.errors import UNFINISHED, in_one_line
from conf.files import Broken, sealed, unsealed, write_json


class BrokenFile(Exception):
    """What is wrong with a file."""


def write_file(value: Any, path: Path) -> dict[str, int]:
    """`torch.save`, down to the disk; returns `size` and `crc32` of the file. Raises OSError."""
    with open(path, "wb") as file:
        summed = _Summed(file)
        try:
            torch.save(value, summed)  # type: ignore[arg-type]
        except RuntimeError as error:
            # PyTorch's writer tells what a failed write left behind, not why it failed.
            raise summed.error or error from None
        file.flush()
        os.fsync(file.fileno())
    return {"size": summed.size, "crc32": summed.crc}


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """A file as Transformers and peft read it. Raises OSError."""
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"}
        )
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # the library lets its owner alone read it


def check_file(path: Path, *, size: int, crc32: int) -> None:
    """Raises BrokenFile unless the file is what was written."""
    try:
        found = path.stat().st_size
        if found != size:
            raise BrokenFile(f"{path.name} has {found:,} bytes instead of {size:,}")
        crc = 0
        with open(path, "rb") as file:
            while block := file.read(2**20):
                crc = zlib.crc32(block, crc)
    except OSError as error:
        raise BrokenFile(f"{path.name}: {error.strerror}") from error
    if crc != crc32:
        raise BrokenFile(f"{path.name} holds other bytes than were written")


def why_unread(error: Exception) -> str:
    """Why `torch.load` of tensors and plain values alone refused a file, without its advice to trust it."""
    foreign = re.search(r"GLOBAL (\w[\w.]*\w)", str(error))
    return f"a pickle of {foreign[1]}" if foreign else in_one_line(error)


class _Summed:
    """A file that sums what is written to it, and remembers why it could not be."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size, self.crc = 0, 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.crc = zlib.crc32(data, self.crc)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


DESCRIBED = "checkpoint.json"
SHARD = "optim_states.pt"  # how the name of a file ends that holds one rank's share of the optimizer


@dataclass(frozen=True)
class Checkpoint:
    """What `checkpoint.json` says."""

    step: int
    ranks: int
    stage: int  # of ZeRO
    state: dict[str, Any]  # the run's own, beside the engine's
    files: dict[str, dict[str, int]]  # size and crc32, by name

    @property
    def name(self) -> str:
        """The folder's."""
        return f"step-{self.step:06d}"

    def fits(self, ranks: int) -> bool:
        """Whether so many ranks can load it as it is."""
        return self.ranks == ranks or not any(name.endswith(SHARD) for name in self.files)


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint.json`, which says of itself what it says of the files."""
    write_json(folder / DESCRIBED, sealed(asdict(checkpoint)))


def read_checkpoint(folder: Path, *, rank: int = 0, ranks: int = 1) -> Checkpoint:
    """The checkpoint of a folder whose files, or this rank's share of them, are whole.

    Raises BrokenFile, and UserError for a folder with files that are not listed, or are no regular files.
    """
    try:
        regular = {entry.name: entry.is_file(follow_symlinks=False) for entry in os.scandir(folder)}
    except OSError as error:
        raise BrokenFile(str(error.strerror)) from error
    if strange := sorted(name for name in regular if not regular[name]):
        raise _unlisted(folder, strange)  # before checkpoint.json is read, which may be a pipe
    found = _described(folder)
    if strange := sorted(regular.keys() - {DESCRIBED, *found.files}):
        raise _unlisted(folder, strange)
    if missing := sorted(found.files.keys() - regular.keys()):
        raise BrokenFile(f"{missing[0]}: {os.strerror(errno.ENOENT)}")
    for name in sorted(found.files)[rank::ranks]:
        check_file(folder / name, **found.files[name])
    return found


def _described(folder: Path) -> Checkpoint:
    """Return what `checkpoint.json` says of its folder. Raise BrokenFile for what no save writes."""
    try:
        found = Checkpoint(**unsealed(folder / DESCRIBED))
    except Broken as error:
        raise BrokenFile(f"{DESCRIBED} {error}") from None
    except TypeError:
        raise BrokenFile(f"{DESCRIBED} has other fields than this version's") from None
    numbers = (found.step, found.ranks, found.stage)
    if any(type(number) is not int for number in numbers) or found.name != folder.name:
        raise BrokenFile(f"{DESCRIBED} must describe {folder.name}, got step {found.step}")
    if not isinstance(found.files, dict) or not all(map(_is_plain, found.files, found.files.values())):
        raise BrokenFile(f"{DESCRIBED} must list files by plain names, each with size and crc32")
    return found


def _is_plain(name: str, facts: Any) -> bool:
    return (
        Path(name).name == name
        and isinstance(facts, dict)
        and facts.keys() == {"size", "crc32"}
        and all(type(number) is int for number in facts.values())
    )


def _unlisted(folder: Path, strange: Sequence[str]) -> UserError:
    return UserError(
        f"{folder} must contain only the regular files that {DESCRIBED} lists, got {', '.join(strange)}. "
        "Remove what is not listed, or restore the folder."
    )


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """The step that a checkpoint's folder is named for."""
    return int(folder.name.removeprefix("step-"))


def find_whole(
    folders: Iterable[Path], read: Callable[[Path], Checkpoint] = read_checkpoint
) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The first whole checkpoint, and what is wrong with those before it. `read` raises BrokenFile.

    Raises UserError when there are checkpoints and none is whole.
    """
    broken: dict[Path, str] = {}
    for folder in folders:
        try:
            return read(folder), broken
        except BrokenFile as error:
            broken[folder] = str(error)
    if broken:
        told = "; ".join(f"{folder.name}: {why}" for folder, why in broken.items())
        raise UserError(
            f"{next(iter(broken)).parent}: wanted a whole checkpoint, found none ({told})", page=UNFINISHED
        )
    return None, broken
