"""Run the domains, one input after another; the last line is JSON, and the exit code 1 where one failed.

A failing input's folder stays, with what was wrong in `failure.txt`; `--only N` tries input N again.
"""

import argparse
import contextlib
import faulthandler
import importlib
import io
import json
import pkgutil
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import tests.drills.fuzz as package

SECONDS = 180.0  # for one input: more is a hang, even on a machine that others use
MEMORY = 10 * 2**30  # bytes that this process may have: a size that was made up must not take the machine


class Hang(BaseException):
    """No Exception: what is under test may catch these."""


def domains() -> dict[str, ModuleType]:
    """The modules here that are one, by name."""
    names = [found.name for found in pkgutil.iter_modules(package.__path__) if found.name != "__main__"]
    modules = {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "run")}


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Hang in what takes longer; where even that is not heard, end the process with its stack."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"took longer than {seconds:g} s")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(2 * seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def attempt(module: ModuleType, rng: random.Random, folder: Path, seconds: float) -> tuple[str, str]:
    """(the class of the outcome, what was wrong); what the input printed goes nowhere."""
    try:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), limited(seconds):
            return module.run(rng, folder), ""
    except KeyboardInterrupt:
        raise
    except BaseException:  # a hang, an exit and a panic of Rust's are failures too
        return "failed", traceback.format_exc()


def drill(name: str, module: ModuleType, numbers: Sequence[int], given: argparse.Namespace) -> dict[str, Any]:
    """All inputs of a domain: how many, of what outcome, and which failed."""
    outcomes, failed, slowest, start = Counter[str](), list[int](), 0.0, time.perf_counter()
    for number in numbers:
        folder = given.folder / f"{name}-{given.seed}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        begun = time.perf_counter()
        # A number's input depends on nothing before it.
        outcome, wrong = attempt(module, random.Random(f"{name} {given.seed} {number}"), folder, given.seconds)
        slowest = max(slowest, time.perf_counter() - begun)
        outcomes[outcome] += 1
        if wrong:
            failed.append(number)
            (folder / "failure.txt").write_text(wrong, encoding="utf-8", errors="backslashreplace")
            print(f"{name} {number}: {wrong.splitlines()[-1]}\n  see {folder}", flush=True)
        else:
            shutil.rmtree(folder)
        if (done := sum(outcomes.values())) % 500 == 0:
            print(f"{name}: {done} inputs, {len(failed)} failed", flush=True)
    seconds = time.perf_counter() - start
    return {
        "inputs": len(numbers),
        **dict(outcomes.most_common()),
        "seconds": round(seconds, 1),
        "slowest": round(slowest, 2),
        "failed_inputs": failed,
    }


def main() -> None:
    """The domains asked for, by default all."""
    found = domains()
    parser = argparse.ArgumentParser(prog="python -m tests.drills.fuzz", description=__doc__)
    parser.add_argument("--domain", default=",".join(found), help="names with commas between; by default all")
    parser.add_argument("--count", type=int, help="inputs of each; by default the domain's own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one input, by its number")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one input")
    parser.add_argument("--folder", type=Path, help="where failing inputs are kept; by default a new one")
    given = parser.parse_args()
    if unknown := set(given.domain.split(",")) - set(found):
        parser.error(f"--domain: wanted some of {', '.join(found)}, found {', '.join(sorted(unknown))}")
    given.folder = given.folder or Path(tempfile.mkdtemp(prefix="fuzz-"))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    results: dict[str, Any] = {}
    for name in given.domain.split(","):
        count = found[name].COUNT if given.count is None else given.count
        numbers = range(count) if given.only is None else [given.only]
        results[name] = drill(name, found[name], numbers, given)
    failures = sum(len(result["failed_inputs"]) for result in results.values())
    inputs = sum(result["inputs"] for result in results.values())
    print(json.dumps({"seed": given.seed, "inputs": inputs, "failed": failures, "domains": results}))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
