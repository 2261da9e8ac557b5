"""Out of memory, told as a user's mistake: what was asked for, and what to lower."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from conf import UserError


@contextmanager
def enough_memory(wanted: str, remedy: str) -> Iterator[None]:
    """Raises UserError where the block runs out of a device's memory."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _told(wanted, remedy) from error
    except RuntimeError as error:  # what PyTorch raises for a CPU's memory has no class of its own
        if "can't allocate memory" not in str(error):
            raise
        raise _told(wanted, remedy) from error


def _told(wanted: str, remedy: str) -> UserError:
    return UserError(f"out of memory: wanted {wanted}, found too little: {remedy}")


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**30:,.2f} GiB"
