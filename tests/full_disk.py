"""The nearest to a full disk that needs no root: a limit on the size of a file."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """While the block lasts, no file can be written beyond so many bytes: OSError 27, where a disk says 28."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
