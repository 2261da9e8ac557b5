"""One checkpoint: what checkpoint.json says of its folder, whether its files are intact, and its tensors.

Tensors in PyTorch's files are ranges of bytes: located without reading them, read without holding the file. Not
by memory map: touched pages would stay with the process and count as its memory. Needs no DeepSpeed.
"""

import errno
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch._subclasses import FakeTensorMode

from conf import UserError
from conf.errors import UNFINISHED, in_one_line
from conf.files import Corrupt, read_checksummed, with_checksum, write_json

DESCRIBED = "checkpoint.json"
SHARD = "optim_states.pt"  # the end of the names of files with one rank's share of the optimizer
BLOCK = 2**22  # numbers in memory beside the result while their type changes


class BrokenFile(Exception):
    """What is wrong with a file."""


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
        """The folder's name."""
        return f"step-{self.step:06d}"

    def fits(self, ranks: int) -> bool:
        """Return whether so many ranks can load it as it is."""
        return self.ranks == ranks or not any(
            name.endswith(SHARD) for name in self.files
        )


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint.json`, which has a checksum of its own."""
    write_json(folder / DESCRIBED, with_checksum(asdict(checkpoint)))


def read_checkpoint(folder: Path, *, rank: int = 0, ranks: int = 1) -> Checkpoint:
    """Return the checkpoint of a folder whose files, or this rank's share of them, are intact.

    Raises BrokenFile, and UserError for a folder with files that are not listed, or are no regular files.
    """
    try:
        regular = {
            entry.name: entry.is_file(follow_symlinks=False)
            for entry in os.scandir(folder)
        }
    except OSError as error:
        raise BrokenFile(str(error.strerror)) from error
    # Before checkpoint.json is read, which may be a pipe.
    _refuse(folder, [name for name in regular if not regular[name]])
    checkpoint = _described(folder)
    _refuse(folder, regular.keys() - {DESCRIBED, *checkpoint.files})
    if missing := sorted(checkpoint.files.keys() - regular.keys()):
        raise BrokenFile(f"{missing[0]}: {os.strerror(errno.ENOENT)}")
    for name in sorted(checkpoint.files)[rank::ranks]:
        check_file(folder / name, **checkpoint.files[name])
    return checkpoint


def _described(folder: Path) -> Checkpoint:
    """Return what `checkpoint.json` says of its folder. Raise BrokenFile for what no save writes."""
    try:
        checkpoint = Checkpoint(**read_checksummed(folder / DESCRIBED))
        listed = all(
            {"size", "crc32"} == facts.keys() for facts in checkpoint.files.values()
        )
    except Corrupt as error:
        raise BrokenFile(f"{DESCRIBED} {error}") from None
    except (TypeError, AttributeError):
        raise BrokenFile(f"{DESCRIBED} has other fields than this version's") from None
    if type(checkpoint.step) is not int or checkpoint.name != folder.name or not listed:
        raise BrokenFile(
            f"{DESCRIBED} must describe {folder.name}, got step {checkpoint.step}"
        )
    return checkpoint


def _refuse(folder: Path, names: Iterable[str]) -> None:
    """Raise UserError for unlisted files: DeepSpeed looks for files by patterns, in subfolders too."""
    if unlisted := sorted(names):
        raise UserError(
            f"{folder} must contain only the regular files that {DESCRIBED} lists, got {', '.join(unlisted)}. "
            "Remove what is not listed, or restore the folder."
        )


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    paths = [
        path
        for path in folder.glob("step-*")
        if path.name.removeprefix("step-").isdecimal()
    ]
    return sorted(paths, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Return the step that a checkpoint's folder is named for."""
    return int(folder.name.removeprefix("step-"))


def find_whole(
    folders: Iterable[Path], read: Callable[[Path], Checkpoint] = read_checkpoint
) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Return the first intact checkpoint, and what is wrong with those before it. `read` raises BrokenFile.

    Raises UserError when there are checkpoints and none is intact.
    """
    broken: dict[Path, str] = {}
    for folder in folders:
        try:
            return read(folder), broken
        except BrokenFile as error:
            broken[folder] = str(error)
    if broken:
        reasons = "; ".join(f"{folder.name}: {why}" for folder, why in broken.items())
        raise UserError(
            f"{next(iter(broken)).parent} must have an intact checkpoint, got none ({reasons})",
            page=UNFINISHED,
        )
    return None, broken


def write_file(value: Any, path: Path) -> dict[str, int]:
    """Write by `torch.save`, down to the disk; return `size` and `crc32` of the file. Raises OSError."""
    with open(path, "wb") as file:
        summed = _Summed(file)
        try:
            torch.save(value, summed)  # type: ignore[arg-type]
        except RuntimeError as error:
            # PyTorch's writer reports what a failed write left behind, not why it failed.
            raise summed.error or error from None
        file.flush()
        os.fsync(file.fileno())
    return {"size": summed.size, "crc32": summed.crc}


class _Summed:
    """A file that sums what is written to it, and stores why a write failed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = 0
        self.crc = 0
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


def check_file(path: Path, *, size: int, crc32: int) -> None:
    """Raise BrokenFile unless the file is what was written."""
    try:
        if (actual := path.stat().st_size) != size:
            raise BrokenFile(f"{path.name} has {actual:,} bytes instead of {size}")
        crc = 0
        with open(path, "rb") as file:
            while block := file.read(2**20):
                crc = zlib.crc32(block, crc)
    except OSError as error:
        raise BrokenFile(f"{path.name}: {error.strerror}") from error
    if crc != crc32:
        raise BrokenFile(f"{path.name} has a checksum mismatch: the file is corrupt")


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file as Transformers and peft read it. Raises OSError."""
    try:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    path.chmod(
        path.parent.stat().st_mode & 0o666
    )  # the library lets its owner alone read it


def why_unread(error: Exception) -> str:
    """Return why `torch.load` with weights_only refused a file, without its advice to trust the file."""
    foreign = re.search(r"GLOBAL (\w[\w.]*\w)", str(error))
    return f"a pickle of {foreign[1]}" if foreign else in_one_line(error)


class _Unread:
    """Replaces an object of DeepSpeed's that says nothing of weights: loading it needs no DeepSpeed."""


# All classes in our checkpoints beside tensors and plain values; a pickle of anything else is refused.
KNOWN: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Unread, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Unread, "deepspeed.utils.tensor_fragment.fragment_address"),
]


@dataclass(frozen=True)
class ByteRange:
    """`count` numbers of type `dtype` from byte `start` of a file on."""

    path: Path
    start: int
    dtype: torch.dtype
    count: int


def index(path: Path) -> Any:
    """Return what `torch.save` wrote into a file, with tensors that know their place in it and hold no data.

    Raises UserError for a file that contains more than tensors and what is KNOWN.
    """
    try:
        with torch.serialization.safe_globals(KNOWN), FakeTensorMode():
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, if the file is not ours
        raise UserError(
            f"{path} must be a file as DeepSpeed 0.19 writes it, got {why_unread(error)}"
        ) from error


def locate(path: Path, tensor: Tensor) -> ByteRange:
    """Return where a tensor of an `index` lies. Raises ValueError for one that is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} with gaps")
    storage: Any = tensor.untyped_storage()
    start = storage._checkpoint_offset + int(tensor.storage_offset()) * tensor.itemsize
    return ByteRange(path, start, tensor.dtype, tensor.numel())


def cut(ranges: Sequence[ByteRange], start: int, count: int) -> list[ByteRange]:
    """Return the numbers `start` to `start + count` of the vector that the ranges make, end to end.

    Raises ValueError when it is shorter.
    """
    parts = []
    begin = 0
    for part in ranges:
        first = max(start - begin, 0)
        last = min(start + count - begin, part.count)
        if first < last:
            parts.append(
                replace(
                    part,
                    start=part.start + first * part.dtype.itemsize,
                    count=last - first,
                )
            )
        begin += part.count
    if sum(part.count for part in parts) != count:
        raise ValueError(
            f"there must be {count} numbers from {start} on, got {begin} in all"
        )
    return parts


def read(
    ranges: Sequence[ByteRange], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the ranges end to end, as a tensor of a shape and a type, with at most BLOCK numbers beside it.

    Raises UserError when a file ends before its range does.
    """
    whole = torch.empty(math.prod(shape), dtype=dtype)
    at = 0
    for part in ranges:
        with open(part.path, "rb", buffering=0) as file:
            file.seek(part.start)
            for place in whole[at : at + part.count].split(BLOCK):
                block = (
                    place
                    if part.dtype == dtype
                    else torch.empty(len(place), dtype=part.dtype)
                )
                buffer = block.view(torch.uint8).numpy().data
                if file.readinto(buffer) != len(buffer):
                    raise UserError(
                        f"{part.path} must have {part.count} numbers at byte {part.start}, got its end"
                    )
                if block is not place:
                    place.copy_(block)
        at += part.count
    return whole.view(*shape)
