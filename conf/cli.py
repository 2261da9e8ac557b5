"""The command line of a stage: settings to its main; help; a mistake as one line. Knows nothing of stages.

Also multirun, `-m`: a process for each combination of the values with commas, one after the other, as in
`python -m train -m objective.L=3,5 out='runs/sweep/${objective.L}'`; and the console script adaptive-tokens.
"""

import errno
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any, NoReturn, TypeVar, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.errors import HydraException
from rich.console import Console

from conf.compose import as_yaml, config_groups, settings, unsigned
from conf.console import print_line
from conf.errors import RankLocalError, UserError, describe_error, in_one_line, visible
from conf.help import describe, link, print_help
from conf.hub import replace_hub_names
from conf.schema import kind_of, types_of

T = TypeVar("T")
GRACE = 5.0  # seconds
# Errors of files and disks that are the user's to mend.
OF_THE_PLACE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
}
OF_THE_PLACE |= {
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
    commas.
    """
    config: Any = None
    try:
        with standard_output():
            if _answer(sys.argv[1:], entry, schema):
                return
            overrides = [
                argument for argument in sys.argv[1:] if argument not in MULTIRUN
            ]
            if len(overrides) < len(sys.argv[1:]):
                sys.exit(sweep(entry, schema, overrides))
            config = settings(entry, schema, overrides)
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
        sentence = f"{place}: {describe_error(error)}"
        _fail(sentence, link(sentence, None, entry, schema))
    except KeyboardInterrupt:
        sys.exit(130)


def _answer(arguments: Sequence[str], entry: str, schema: type) -> bool:
    """Print help or the settings alone, where the arguments ask for these; return whether they do."""
    wants_help = not {*HELP}.isdisjoint(arguments)
    if not wants_help and {*CFG[:2]}.isdisjoint(arguments):
        return False
    if _is_first() and wants_help:
        print_help(
            describe(entry, schema), Console(highlight=False, markup=False, emoji=False)
        )
    elif _is_first():
        print(
            as_yaml(entry, schema, [text for text in arguments if text not in CFG]),
            end="",
        )
    return True


def _is_first() -> bool:
    """Return whether this is the rank of its machine that says what all of them know."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _fail(sentence: str, place: str | None, *, rank_local: bool = False) -> NoReturn:
    # Every rank of a torchrun job meets the same mistake: one of them says it.
    if rank_local or _is_first():
        more = f"\n  see {place}" if place else ""
        print(f"error: {visible(sentence)}{more}", file=sys.stderr, flush=True)
    else:
        time.sleep(
            GRACE
        )  # torchrun ends all with the first that ends: the one that speaks may be slower
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
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # the lowest number that is free
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
        except (
            OSError
        ):  # Python would flush it once more when it exits, and print another error
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


MULTIRUN = ("-m", "--multirun")
STOPPED = (
    75,
    130,
    128 + signal.SIGTERM,
    -signal.SIGINT,
    -signal.SIGTERM,
    -signal.SIGKILL,
)  # exit codes


def sweep(entry: str, schema: type, overrides: Sequence[str]) -> int:
    """Run the stage with every combination of settings; return the first exit code that is not 0.

    A job that fails is followed by the next; one that was stopped ends the sweep, and the same command goes on.
    Raises UserError before the first job, for settings that no job can have and for jobs that share an `out`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "-m must run in one process, got torchrun. Use a shell loop: for L in 3 5; do torchrun ... -m "
            "train objective.L=$L out=runs/$L; done"
        )
    jobs = jobs_of(entry, schema, overrides)
    swept = [
        index
        for index in range(len(overrides))
        if len({job[index] for job in jobs}) > 1
    ]
    outs: dict[str, Sequence[str]] = {}
    for job in jobs:
        out = getattr(settings(entry, schema, job), "out", None)
        if out and outs.setdefault(out, job) is not job:
            example = "-".join(
                f"${{{unsigned(job[index].partition('=')[0])}}}" for index in swept
            )
            raise UserError(
                f"out={out} must differ between the jobs of -m, got one. Use out='DIR/{example}'"
            )
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "called by python -m"
    module = spec.name.removesuffix(".__main__")
    failed: dict[str, int] = {}
    for number, job in enumerate(jobs, start=1):
        name = " ".join(job[index] for index in swept)
        print_line(f"{module}: job {number} of {len(jobs)}: {name}")
        code = _run_job([sys.executable, "-m", module, *job])
        if code:
            failed[name] = code
        if code in STOPPED:
            print_line(
                f"{module}: stopped in job {number}: the same command goes on",
                error=True,
            )
            break
    if failed:
        print_line(
            f"{module}: {len(failed)} of {len(jobs)} jobs failed: {'; '.join(failed)}",
            error=True,
        )
    return abs(next(iter(failed.values()), 0))


def jobs_of(
    entry: str, schema: type, overrides: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return the settings of every job: all combinations, of which the last value changes fastest."""
    several = {group.name for group in config_groups(entry) if group.several}
    return list(product(*(_values(text, schema, several) for text in overrides)))


def _values(override: str, schema: type, several: set[str]) -> list[str]:
    """Return an override once for each of its values.

    Commas make one list of a list setting and of a group of several choices: `k=[1],[3]` sweeps these.
    """
    name, equals, value = override.partition("=")
    types = types_of(kind_of(unsigned(name), schema)[0])
    listed = name in several or any(get_origin(kind) is list for kind in types)
    if not equals or (listed and not value.startswith("[")):
        return [override]
    try:
        parsed = OverridesParser.create().parse_override(override)
        if not parsed.is_sweep_override():
            quoted = str in types and value.startswith(("'", '"'))
            return [f"{name}={parsed.value()}" if quoted else override]
        texts = list(parsed.sweep_string_iterator())
    except HydraException as error:
        if str in types:
            return [override]  # a prompt, or a path with brackets
        raise UserError(
            f"{name} must be values with commas for -m, got {value}: {in_one_line(error)}"
        ) from error
    if str in types and parsed.is_choice_sweep():  # texts without their quotes
        values: list[Any] = parsed.value().list  # type: ignore[union-attr]
        texts = [
            value.text if isinstance(value, QuotedString) else text
            for value, text in zip(values, texts)
        ]
    return [f"{name}={text}" for text in texts]


def _run_job(command: Sequence[str]) -> int:
    """Run a job to its end; it gets the signals that this process gets, so that it can save."""
    child = subprocess.Popen(command)
    # Ctrl-C reaches both; a batch system's signals may reach this process alone.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None)}
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        before[number] = signal.signal(
            number, lambda number, _: child.send_signal(number)
        )
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


COMMANDS = {
    "data": "data_prep",
    "train": "train",
    "export": "train.export",
    "generate": "infer",
    "bench": "infer.bench",
}


def main() -> None:
    """Run the command that the first argument names, with the others as its settings."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        names = "\n".join(
            f"  {name:10} python -m {module}" for name, module in COMMANDS.items()
        )
        is_help = sys.argv[1:] in ([], ["--help"], ["-h"])
        if not is_help:
            _fail(
                f"the command must be one of {', '.join(COMMANDS)}, got {sys.argv[1]}",
                None,
            )
        print(
            f"adaptive-tokens COMMAND [SETTINGS]; COMMAND --help lists the settings\n\n{names}"
        )
        return
    module = COMMANDS[sys.argv.pop(1)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
