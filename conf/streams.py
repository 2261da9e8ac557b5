"""Standard output that is full, closed or without a reader. Knows no stage."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

NAME = "standard output"


class ReaderGone(Exception):
    """Who read standard output reads no more, as `head` does after its lines."""


@contextmanager
def standard_output() -> Iterator[None]:
    """Guard standard output while the block lasts, and flush it; a closed one becomes /dev/null.

    Raises OSError that names it where it cannot be written, and ReaderGone where nobody reads it.
    """
    _open_closed()
    stream = sys.stdout
    sys.stdout = named = _Named(stream)
    try:
        yield
        named.flush()
    except BrokenPipeError as error:
        if error.filename != NAME:
            raise
        raise ReaderGone from error
    finally:
        sys.stdout = stream
        _drop_if_unwritable(stream)


class _Named:
    """A stream whose errors say that it is standard output: else they name no file."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return _call(self._stream.write, text)

    def flush(self) -> None:
        _call(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _call(action: Callable[..., Any], *arguments: str) -> Any:
    try:
        return action(*arguments)
    except OSError as error:
        raise OSError(error.errno, error.strerror, NAME) from error


def _drop_if_unwritable(stream: Any) -> None:
    """Have what cannot be written go to /dev/null: Python flushes it once more when it exits, and says so."""
    try:
        stream.flush()
    except OSError:
        with suppress(OSError), open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), stream.fileno())


def _open_closed() -> None:
    """Give the descriptors that are closed to /dev/null: the next files would get their numbers, and what a
    program that is started prints.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (until exit)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 (until exit)
