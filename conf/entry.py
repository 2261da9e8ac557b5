"""The command line of a stage: settings to its main; help; a mistake as one line. Knows nothing of stages."""

import errno
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rich.console import Console

from conf.choices import groups
from conf.compose import as_yaml, settings
from conf.describe import describe
from conf.errors import RankLocalError, UserError, visible
from conf.help import print_help
from conf.hub import replace_hub_names
from conf.links import link
from conf.streams import ReaderGone, standard_output
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


def run(entry: str, schema: type[T], main: Callable[[T], None]) -> None:
    """Call `main` with the settings of the command line; a UserError ends in one line, the page that explains
    it, and code 2.

    --help tells of every setting; --cfg prints all of them as they would be, as Hydra's `--cfg job` does;
    -m runs every combination of values with commas (conf/sweep.py).
    """
    config: Any = None
    try:
        with standard_output():
            if _is_answered(sys.argv[1:], entry, schema):
                return
            if any(argument in MULTIRUN for argument in sys.argv[1:]):
                given = [argument for argument in sys.argv[1:] if argument not in MULTIRUN]
                sys.exit(sweep(entry, schema, given))
            config = settings(entry, schema, sys.argv[1:])
            replace_hub_names(config)
            main(config)
    except UserError as error:
        _fail(str(error), _link(str(error), error.page, entry, schema), alone=isinstance(error, RankLocalError))
    except ReaderGone:
        sys.exit(1)  # as rich does where it writes
    except OSError as error:
        if error.errno not in OF_THE_PLACE:
            raise
        # Of two files the second is written. An error of writing may name none: it is the result's.
        place = error.filename2 or error.filename or f"out={getattr(config, 'out', '')}"
        sentence = f"{place}: {error.strerror}"
        _fail(sentence, _link(sentence, None, entry, schema))
    except KeyboardInterrupt:
        sys.exit(130)


def _is_answered(arguments: Sequence[str], entry: str, schema: type) -> bool:
    """Whether help or the settings alone were asked for, which are then printed."""
    if any(argument in HELP for argument in arguments):
        if _speaks():
            print_help(describe(entry, schema), Console(highlight=False))
        return True
    if any(argument in CFG[:2] for argument in arguments):
        if _speaks():
            print(as_yaml(entry, schema, [text for text in arguments if text not in CFG]), end="")
        return True
    return False


def _speaks() -> bool:
    """Whether this is the one rank of a machine's that says what all of them know."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _link(sentence: str, page: str | None, entry: str, schema: type) -> str | None:
    return link(sentence, page, entry, schema, tuple(group.name for group in groups(entry)))


def _fail(sentence: str, place: str | None, *, alone: bool = False) -> None:
    # Every rank of a torchrun job meets the same mistake: one of them says it.
    if alone or _speaks():
        more = f"\n  see {place}" if place else ""
        print(f"error: {visible(sentence)}{more}", file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE)  # torchrun ends all with the first that ends: the one that speaks may be slower
    sys.exit(2)
