"""The command line of a stage: settings to its main; help; a mistake as one line. Knows nothing of stages."""

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

from rich.console import Console

from conf.compose import as_yaml, settings
from conf.errors import RankLocalError, UserError, visible
from conf.help import describe, link, print_help
from conf.hub import replace_hub_names
from conf.sweep import MULTIRUN, sweep

T = TypeVar("T")
GRACE = 5.0  # seconds
# Errors of files and disks that are the user's to mend.
OF_THE_PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO} | {
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.EBUSY,
}
HELP = ("-h", "--help")
CFG = ("-c", "--cfg", "job")  # Hydra's, as its users type it
STDOUT = "standard output"


def run(entry: str, schema: type[T], main: Callable[[T], None]) -> None:
    """Call `main` with the settings of the command line.

    A UserError ends in one line, the page that explains it, and code 2. --help tells of every setting; --cfg
    prints all of them as they would be, as Hydra's `--cfg job` does; -m runs every combination of values with
    commas (conf/sweep.py).
    """
    config: Any = None
    try:
        with standard_output():
            if _answer(sys.argv[1:], entry, schema):
                return
            if any(argument in MULTIRUN for argument in sys.argv[1:]):
                overrides = [argument for argument in sys.argv[1:] if argument not in MULTIRUN]
                sys.exit(sweep(entry, schema, overrides))
            config = settings(entry, schema, sys.argv[1:])
            replace_hub_names(config)
            main(config)
    except UserError as error:
        place = link(str(error), error.page, entry, schema)
        _fail(str(error), place, rank_local=isinstance(error, RankLocalError))
    except ReaderGone:
        sys.exit(1)  # as rich does where it writes
    except OSError as error:
        if error.errno not in OF_THE_PLACE:
            raise
        # Of two files the second is written. An error of writing may name none: it is the result's.
        place = error.filename2 or error.filename or f"out={getattr(config, 'out', '')}"
        sentence = f"{place}: {error.strerror}"
        _fail(sentence, link(sentence, None, entry, schema))
    except KeyboardInterrupt:
        sys.exit(130)


def _answer(arguments: Sequence[str], entry: str, schema: type) -> bool:
    """Print help or the settings alone, where the arguments ask for these; return whether they do."""
    if any(argument in HELP for argument in arguments):
        if _is_first():
            print_help(describe(entry, schema), Console(highlight=False, markup=False, emoji=False))
        return True
    if any(argument in CFG[:2] for argument in arguments):
        if _is_first():
            print(as_yaml(entry, schema, [text for text in arguments if text not in CFG]), end="")
        return True
    return False


def _is_first() -> bool:
    """Return whether this is the rank of its machine that says what all of them know."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _fail(sentence: str, place: str | None, *, rank_local: bool = False) -> NoReturn:
    # Every rank of a torchrun job meets the same mistake: one of them says it.
    if rank_local or _is_first():
        more = f"\n  see {place}" if place else ""
        print(f"error: {visible(sentence)}{more}", file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE)  # torchrun ends all with the first that ends: the one that speaks may be slower
    sys.exit(2)


class ReaderGone(Exception):
    """The reader of standard output reads no more, as `head` does after its lines."""


@contextmanager
def standard_output() -> Iterator[None]:
    """Guard a block's standard output: flush it at the end; a closed one is /dev/null.

    Raises OSError that names it where it cannot be written, and ReaderGone where nobody reads it.
    """
    # The next files would get the numbers of closed descriptors, and what a program that is started prints.
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (until exit)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 (until exit)
    stream = sys.stdout
    sys.stdout = named = _NamedStream(stream)
    try:
        yield
        named.flush()
    except BrokenPipeError as error:
        if error.filename != STDOUT:
            raise
        raise ReaderGone from error
    finally:
        sys.stdout = stream
        try:
            stream.flush()
        except OSError:  # Python would flush it once more when it exits, and print another error
            with suppress(OSError), open(os.devnull, "w") as devnull:
                os.dup2(devnull.fileno(), stream.fileno())


class _NamedStream:
    """A stream whose errors say that it is standard output: else they name no file."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._call(self._stream.write, text)

    def flush(self) -> None:
        self._call(self._stream.flush)

    def _call(self, action: Callable[..., Any], *arguments: str) -> Any:
        try:
            return action(*arguments)
        except OSError as error:
            raise OSError(error.errno, error.strerror, STDOUT) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
