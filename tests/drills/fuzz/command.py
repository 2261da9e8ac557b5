"""A command as its user calls it: in this process, so that imports are paid once, and now and then for real."""

import contextlib
import io
import os
import random
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tests.told import error

ROOT = Path(__file__).parents[3]
REAL = 200  # one command in so many runs in a process of its own too


@dataclass(frozen=True)
class Ended:
    """How a command ended: `told` is the one sentence of a refusal, else empty."""

    told: str
    printed: str  # on stdout

    @property
    def outcome(self) -> str:
        """The class of the input."""
        return "refused" if self.told else "fine"


def call(
    module: str, arguments: Sequence[str], rng: random.Random, *, environment: Mapping[str, str] | None = None
) -> Ended:
    """`python -m module arguments`. Raises AssertionError for what is neither a good end nor one sentence."""
    real = rng.randrange(REAL) == 0
    printed, said = io.StringIO(), io.StringIO()
    with _as(module, arguments, environment), redirect_stdout(printed), redirect_stderr(said):
        try:
            runpy.run_module(module, run_name="__main__")
            code: int | str | None = 0
        except SystemExit as end:
            code = end.code
    ended = _judged(code, printed.getvalue(), said.getvalue())
    if real and all("\0" not in text for text in arguments):  # an argument cannot have one
        answer = subprocess.run(
            [sys.executable, "-m", module, *map(os.fsencode, arguments)],
            cwd=ROOT,
            env=os.environ | (environment or {}),
            capture_output=True,
        )
        texts = [out.decode("utf-8", "replace") for out in (answer.stdout, answer.stderr)]
        alone = _judged(answer.returncode, *texts)
        # A finished folder has nothing to do: then the second may be fine where the first was.
        assert alone.outcome == ended.outcome, f"in this process {ended}, as a command {alone}"
    return ended


@contextlib.contextmanager
def _as(module: str, arguments: Sequence[str], environment: Mapping[str, str] | None) -> Iterator[None]:
    with patch.object(sys, "argv", [module, *arguments]), patch.dict(os.environ, environment or {}):
        yield


def _judged(code: int | str | None, printed: str, said: str) -> Ended:
    assert code in (0, None, 2), f"exit code {code}: {said}"
    assert "Traceback" not in said, said
    return Ended(error(_last(said)) if code == 2 else "", printed)


def _last(said: str) -> str:
    """From the refusal on: a library may have warned before."""
    return said[max(0, said.rfind("error: ")) :]
