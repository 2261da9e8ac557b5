"""Multirun, `-m`: a process for each combination of the values with commas, one after the other.

python -m train -m objective.L=3,5 out='runs/sweep/${objective.L}'
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.errors import HydraException

from conf.choices import groups
from conf.compose import settings, unsigned
from conf.console import print_line
from conf.errors import UserError, in_one_line
from conf.schema import kind_of, types_of

MULTIRUN = ("-m", "--multirun")
STOPPED = (75, 130, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL)  # exit codes


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
    swept = [index for index in range(len(overrides)) if len({job[index] for job in jobs}) > 1]
    outs: dict[str, Sequence[str]] = {}
    for job in jobs:
        out = getattr(settings(entry, schema, job), "out", None)
        if out and outs.setdefault(out, job) is not job:
            example = "-".join(f"${{{unsigned(job[index].partition('=')[0])}}}" for index in swept)
            raise UserError(f"out={out} must differ between the jobs of -m, got one. Use out='DIR/{example}'")
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "called by python -m"
    module = spec.name.removesuffix(".__main__")
    failed: dict[str, int] = {}
    for number, job in enumerate(jobs, start=1):
        name = " ".join(job[index] for index in swept)
        print_line(f"{module}: job {number} of {len(jobs)}: {name}")
        code = _run([sys.executable, "-m", module, *job])
        if code:
            failed[name] = code
        if code in STOPPED:
            print_line(f"{module}: stopped in job {number}: the same command goes on", error=True)
            break
    if failed:
        print_line(f"{module}: {len(failed)} of {len(jobs)} jobs failed: {'; '.join(failed)}", error=True)
    return abs(next(iter(failed.values()), 0))


def jobs_of(entry: str, schema: type, overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the settings of every job: all combinations, of which the last value changes fastest."""
    several = {group.name for group in groups(entry) if group.several}
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
        texts = [value.text if isinstance(value, QuotedString) else text for value, text in zip(values, texts)]
    return [f"{name}={text}" for text in texts]


def _run(command: Sequence[str]) -> int:
    """Run a job to its end; it gets the signals that this process gets, so that it can save."""
    child = subprocess.Popen(command)
    # Ctrl-C reaches both; a batch system's signals may reach this process alone.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None)}
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        before[number] = signal.signal(number, lambda number, _: child.send_signal(number))
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
