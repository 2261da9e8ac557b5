"""Random and damaged inputs by the thousand: no traceback, no hang, no silent wrong result.

    python -m tests.drills.fuzz [--domain settings data] [--count 3000] [--seed 0] [--only 17] [--folder DIR]

A domain is a module of this package with COUNT, the inputs of the whole drill, and `run(rng, folder) -> str`,
which makes one input in the empty folder, tries it and returns the outcome ("fine", "refused", or a word of its
own). It raises AssertionError with what is wrong. Any other exception is a traceback that a user would see.

The folder of a failing input stays, with the failure in failure.txt; `--only N` tries input N again. The last
line is JSON; the exit code is 1 where an input failed.
"""

import argparse
import contextlib
import faulthandler
import io
import json
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
from types import ModuleType
from typing import Any

from tests.drills.fuzz import damage, data, records, requests, settings

DOMAINS = {module.__name__.rpartition(".")[2]: module for module in (settings, data, requests, records, damage)}
SECONDS = 180.0  # for one input: more is a hang, even on a busy machine
MEMORY = 10 * 2**30  # bytes of this process: an invented size must not take the machine


class Hang(BaseException):
    """An input took too long. No Exception: the code under test may catch those."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Hang after `seconds`; after twice as many end the process with its stack."""

    def ring(*_: Any) -> None:
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
    """Return (outcome, failure); output of the input is discarded."""
    try:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), time_limit(seconds):
            return module.run(rng, folder), ""
    except KeyboardInterrupt:
        raise
    except BaseException:  # a hang, an exit and a panic of Rust are failures too
        return "failed", traceback.format_exc()


def drill(name: str, numbers: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """Try the inputs of a domain; return their number, outcomes, time and the failed ones."""
    outcomes, failed, slowest, start = Counter[str](), list[int](), 0.0, time.perf_counter()
    for number in numbers:
        folder = args.folder / f"{name}-{args.seed}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        begin = time.perf_counter()
        # An input depends on its number alone, not on those before it.
        rng = random.Random(f"{name} {args.seed} {number}")
        outcome, failure = attempt(DOMAINS[name], rng, folder, args.seconds)
        slowest = max(slowest, time.perf_counter() - begin)
        outcomes[outcome] += 1
        if failure:
            failed.append(number)
            (folder / "failure.txt").write_text(failure, encoding="utf-8", errors="backslashreplace")
            print(f"{name} {number}: {failure.splitlines()[-1]}\n  see {folder}", flush=True)
        else:
            shutil.rmtree(folder)
        if (done := outcomes.total()) % 500 == 0:
            print(f"{name}: {done} inputs, {len(failed)} failed", flush=True)
    times = {"seconds": round(time.perf_counter() - start, 1), "slowest": round(slowest, 2)}
    return {"inputs": len(numbers), **dict(outcomes.most_common()), **times, "failed_inputs": failed}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.drills.fuzz", description=__doc__)
    parser.add_argument("--domain", nargs="+", default=list(DOMAINS), choices=DOMAINS)
    parser.add_argument("--count", type=int, help="inputs of each; by default the domain's own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one input, by its number")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one input")
    parser.add_argument("--folder", type=Path, help="where failing inputs stay; by default a new one")
    args = parser.parse_args()
    args.folder = args.folder or Path(tempfile.mkdtemp(prefix="fuzz-"))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    results: dict[str, Any] = {}
    for name in args.domain:
        count = DOMAINS[name].COUNT if args.count is None else args.count
        results[name] = drill(name, range(count) if args.only is None else [args.only], args)
    failures = sum(len(result["failed_inputs"]) for result in results.values())
    inputs = sum(result["inputs"] for result in results.values())
    print(json.dumps({"seed": args.seed, "inputs": inputs, "failed": failures, "domains": results}))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
