"""Report a lack of memory as one sentence for users."""

from collections.abc import Iterator
from contextlib import contextmanager

from conf.errors import MEMORY, UserError, in_one_line, is_out_of_memory


@contextmanager
def enough_memory(remedy: str) -> Iterator[None]:
    """Raise UserError with `remedy` if the block runs out of a device's memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = f"out of memory: {in_one_line(error)}. {remedy}"
        raise UserError(message, page=MEMORY) from error
