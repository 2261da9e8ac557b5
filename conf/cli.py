"""Run a stage from the command line: Hydra's, with every mistake of a user as one line and exit code 2."""

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

import hydra
from omegaconf import DictConfig

from conf.compose import (
    FOLDER,
    as_text,
    explained,
    register,
    to_dataclass,
    with_files,
)
from conf.console import place
from conf.errors import DOCS, FULL, RankLocalError, UserError, describe_error
from conf.hub import replace_hub_names
from conf.interrupt import INTERRUPTED, was_interrupted

T = TypeVar("T")
GRACE = 5.0  # seconds
MULTIRUN = {"-m", "--multirun"}
RESULT_FILE = "SWEEP_RESULT"  # names the file for what a job of a sweep returns
# Hydra's flag for a folder in the user's home, or that folder as a word of its own.
CONFIG_DIR = re.compile(r"\A(--config-dir=|-cd=|)(~/.*)", re.DOTALL)


def run(entry: str, schema: type[T], main: Callable[[T], object]) -> None:
    """Call `main` with the settings of the command line, composed of `conf/<entry>` into `schema`.

    What `main` returns is a job's value for Hydra's sweepers.

    A UserError, settings that cannot be composed, and files that cannot be read or written end in one line and
    code 2, Ctrl-C in code 130, any other error in its traceback and code 1.
    """

    def task(config: DictConfig) -> object:
        with exit_on_error():
            values = to_dataclass(config, entry, schema)
            replace_hub_names(values)
            result = main(values)
        if (file := os.environ.get(RESULT_FILE)) and not place()[0]:
            Path(file).write_text(json.dumps(result), encoding="utf-8")
        return result

    register(schema)
    multirun = not MULTIRUN.isdisjoint(sys.argv)
    overrides = [CONFIG_DIR.sub(_expanded, text) for text in sys.argv[1:]]
    overrides = with_files(overrides, entry)
    sys.argv[1:] = [as_text(text, schema, multirun=multirun) for text in overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, for us to explain
    compose = hydra.main(str(FOLDER / entry), "config", version_base=None)
    with exit_on_error():
        if multirun and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError(
                "-m must run in one process, got torchrun. Start it by python with hydra/launcher=torchrun."
            )
        try:
            with explained(entry, schema):
                compose(task)()
        finally:
            sys.stdout.flush()


def _expanded(match: re.Match[str]) -> str:
    return match[1] + os.path.expanduser(match[2])


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the process, with one line for an error that the user can correct."""
    try:
        yield
    except UserError as error:
        if was_interrupted(error):
            sys.exit(INTERRUPTED)
        _fail(error)
    except BrokenPipeError:  # the reader of standard output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if was_interrupted(error):
            sys.exit(INTERRUPTED)
        if isinstance(error, OSError) and (error.filename or error.errno in FULL):
            # Of two files the second is written; an open one is not named.
            file = error.filename2 or error.filename or "out"
            _fail(UserError(f"{file}: {describe_error(error)}"))
        traceback.print_exc()
        sys.exit(1)


def _fail(error: UserError) -> NoReturn:
    # Every rank of a torchrun job meets the same mistake: one of them reports it.
    if isinstance(error, RankLocalError) or not place()[2]:
        link = f"\n  see {DOCS}/{error.page}" if error.page else ""
        print(f"error: {error}{link}", file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE)  # torchrun ends all ranks with the first that ends
    sys.exit(2)
