"""Read and write files of tensors: safetensors, and the files of `torch.save` in checkpoints.

The files of checkpoints have checksums. Reading a file of `torch.save` neither imports DeepSpeed
nor runs pickled code.
"""

import os
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import UserError, in_one_line


class LazyWeights(Mapping[str, Tensor]):
    """A mapping from names to tensors that reads each tensor on access."""

    _names: Collection[str]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as a safetensors file that Transformers and peft read. Raises OSError."""
    try:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(None, in_one_line(error), str(path)) from error
    make_readable(path)


def make_readable(path: Path) -> None:
    """Give a file the read and write permissions of its folder; safetensors writes mode 600."""
    path.chmod(path.parent.stat().st_mode & 0o666)


class _Placeholder:
    """Replaces a DeepSpeed object without weights, so that loading does not import DeepSpeed."""


def zero_stage(kind: Any, name: str) -> int:
    """Return the number of a stage of ZeRO from its name.

    Python 3.11.2 pickles the enum's member by name, later versions by number.
    """
    return ("disabled", "optimizer_states", "gradients", "weights").index(name)


# All classes in our checkpoints besides tensors and plain values. torch.load refuses a
# pickle with any other class and does not run it.
KNOWN: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (zero_stage, "builtins.getattr"),
    (_Placeholder, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Placeholder, "deepspeed.utils.tensor_fragment.fragment_address"),
]


def load_mapped(path: Path) -> Any:
    """Load a file of `torch.save` with its tensors mapped into memory.

    The system reads a page on first use and may drop it again. Raises UserError for a
    file with objects other than tensors, plain values and the classes of KNOWN.
    """
    try:
        with torch.serialization.safe_globals(KNOWN):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load has many error types for a foreign file
        raise UserError(
            f"{path} must be a checkpoint file of DeepSpeed 0.19, got {refusal(error)}. "
            "Restore it, or delete its checkpoint."
        ) from error


def refusal(error: Exception) -> str:
    """Return why `torch.load` refused a file, without its advice to trust the file."""
    foreign = re.search(r"GLOBAL (\w[\w.]*\w)", str(error))
    return f"a pickle of {foreign[1]}" if foreign else in_one_line(error)


class BrokenFile(Exception):
    """A checkpoint is damaged; the message names the file and the damage."""


def write_file(value: Any, path: Path) -> dict[str, int]:
    """Write a value by `torch.save` and fsync the file; return its `size` in bytes and `crc32`.

    Raises OSError.
    """
    with open(path, "wb") as file:
        writer = _ChecksumWriter(file)
        try:
            torch.save(value, writer)  # type: ignore[arg-type]
        except RuntimeError as error:
            # The error of torch.save does not contain the reason of the failed write.
            raise writer.error or error from None
        file.flush()
        os.fsync(file.fileno())
    return {"size": writer.size, "crc32": writer.crc}


class _ChecksumWriter:
    """A file object that computes size and CRC-32, and stores the error of a failed write."""

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


def check_file(path: Path, written: Mapping[str, int]) -> None:
    """Raise BrokenFile unless the file has the `size` and the `crc32` of `written`."""
    crc = 0
    size = 0
    if path.exists() and not path.is_file():  # opening a FIFO would block forever
        raise BrokenFile(f"{path.name} is not a regular file")
    try:
        with open(path, "rb") as file:
            while block := file.read(2**20):
                crc = zlib.crc32(block, crc)
                size += len(block)
    except OSError as error:
        raise BrokenFile(f"{path.name}: {error.strerror}") from error
    if {"size": size, "crc32": crc} != written:
        raise BrokenFile(f"{path.name} has a checksum mismatch: the file is corrupt")
