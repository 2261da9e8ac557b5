"""Out of memory as a sentence for users: what was needed, and what to lower."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from conf.errors import MEMORY, UserError


@contextmanager
def enough_memory(needed: str, remedy: str) -> Iterator[None]:
    """Raise UserError where the block runs out of a device's memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"out of memory for {needed}: {remedy}", page=MEMORY) from error


def enough_for_weights(
    folder: str | Path, dtype: str, device: str | None
) -> AbstractContextManager[None]:
    """Guard the reading of a directory's weights."""
    stored = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    needed = f"the weights of {folder}, {gib(stored)} on disk, in {dtype} on {device or 'the device'}"
    return enough_memory(needed, "take dtype=bfloat16 or a smaller model")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a device's memory did not suffice."""
    # What PyTorch raises for a CPU's memory is a RuntimeError with no class of its own.
    return isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or "can't allocate memory" in str(error)


def gib(size: float) -> str:
    """Format bytes for people."""
    return f"{size / 2**30:,.2f} GiB"
