"""Files of tensors: why one cannot be written, and, by a checksum, whether what was meant to be is there."""

import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import in_one_line


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
