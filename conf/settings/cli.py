"""Run a stage from the command line by Hydra; report a user's mistake in one line with exit code 2."""

# isort: off
# Imported first, because Ctrl-C may come during the other imports.
from conf.settings.interrupt import INTERRUPTED, was_interrupted

# isort: on
import gc
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
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from conf.console import print_line, torchrun_rank
from conf.errors import DOCS, FULL, RankLocalError, UserError, describe_error
from conf.hub import replace_hub_names
from conf.settings.compose import (
    FOLDER,
    quote_text,
    register,
    replace_file_choices,
    to_dataclass,
    translate_errors,
)

T = TypeVar("T")
#: New objects between two garbage collections. With Python's 700, a tenth of the imports' time is collections.
NEW_OBJECTS = 10_000
GRACE = 5.0  # seconds that other ranks wait for the first rank's message
MULTIRUN = {"-m", "--multirun"}
RESULT_FILE = (
    "SWEEP_RESULT"  # variable with the file for the value that a job of a sweep returns
)
# Hydra's flag with a folder in the user's home, or such a folder as a separate argument.
CONFIG_DIR = re.compile(r"\A(--config-dir=|-cd=|)(~/.*)", re.DOTALL)


def run(entry: str, schema: type[T], main: Callable[[T], object]) -> None:
    """Compose the settings of `conf/<entry>` and the command line into `schema`, and call `main` with them.

    The result of `main` is the job's value for Hydra's sweepers.

    Exit codes: 2, with one line, for a UserError, settings that cannot be composed, and files that cannot be
    read or written; 130 for Ctrl-C; 1, with a traceback, for any other error.
    """
    gc.set_threshold(NEW_OBJECTS)

    def task(config: DictConfig) -> object:
        failures = multirun and allows_failures(HydraConfig.get().sweeper)
        with print_mistake() if failures else exit_on_error():
            values = to_dataclass(config, entry, schema)
            replace_hub_names(values)
            result = main(values)
        if (file := os.environ.get(RESULT_FILE)) and not torchrun_rank()[0]:
            leave_result(Path(file), result)
        return result

    register(schema, groups=any(path.is_dir() for path in (FOLDER / entry).iterdir()))
    multirun = not MULTIRUN.isdisjoint(sys.argv)
    overrides = [CONFIG_DIR.sub(_expanded, text) for text in sys.argv[1:]]
    overrides = replace_file_choices(overrides, entry)
    sys.argv[1:] = [quote_text(text, schema, multirun=multirun) for text in overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of exiting
    compose = hydra.main(str(FOLDER / entry), "config", version_base=None)
    with exit_on_error():
        if multirun and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError(
                "-m must run in one process, got torchrun. Start it by python with hydra/launcher=torchrun."
            )
        try:
            with translate_errors(entry, schema):
                compose(task)()
        finally:
            sys.stdout.flush()


def allows_failures(sweeper: DictConfig) -> bool:
    """Return True if some jobs of a sweep may fail: then Optuna's sweeper gets their errors and goes on."""
    return bool(sweeper.get("max_failure_rate"))


@contextmanager
def print_mistake() -> Iterator[None]:
    """Print a UserError when it is raised; the sweep reports only how many jobs failed."""
    try:
        yield
    except UserError as error:
        _print(error)
        raise


def leave_result(file: Path, result: object) -> None:
    """Write a job's value for the sweep that started it; warn if that fails, since the job has succeeded."""
    try:
        file.write_text(json.dumps(result), encoding="utf-8")
    except OSError as error:
        print_line(
            f"warning: the sweep does not get the value {result}: {file}: {describe_error(error)}. "
            "Start the sweep in a folder that the job's machine can write to.",
            error=True,
        )


def _expanded(match: re.Match[str]) -> str:
    return match[1] + os.path.expanduser(match[2])


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Exit with the code of an error; print one line if the user can correct it."""
    try:
        yield
    except UserError as error:
        if was_interrupted(error):
            sys.exit(INTERRUPTED)
        _fail(error)
    except (
        BrokenPipeError
    ):  # the reader of standard output has exited, for example `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if was_interrupted(error):
            sys.exit(INTERRUPTED)
        if isinstance(error, OSError) and (error.filename or error.errno in FULL):
            # Of two file names the second is the target; errors of open files have no name.
            file = error.filename2 or error.filename or "out"
            _fail(UserError(f"{file}: {describe_error(error)}"))
        traceback.print_exc()
        sys.exit(1)


def _print(error: UserError) -> None:
    link = f"\n  see {DOCS}/{error.page}" if error.page else ""
    print(f"error: {error}{link}", file=sys.stderr, flush=True)


def _fail(error: UserError) -> NoReturn:
    # Every rank of a torchrun job raises the same error; the first rank of a machine prints it.
    if isinstance(error, RankLocalError) or not torchrun_rank()[2]:
        _print(error)
    else:
        time.sleep(GRACE)  # torchrun ends all ranks once one has exited
    sys.exit(2)
