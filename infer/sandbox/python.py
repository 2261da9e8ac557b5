"""Python: the solution in one room, its tests in another, and nothing but data between them.

A solution that runs in its tests' interpreter can always fake a pass: end the process with code 0, print what
a driver prints, answer with an object that equals everything, patch what the tests compare with. Here it has
nothing of the tests to reach: it returns data, which they compare.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from conf import UserError
from infer.sandbox.guard.job import PLAYERS, Job, Limits, Report, Step
from infer.sandbox.program import Program, Verdict
from infer.sandbox.room import HERE, Room

GRACE = 2.0  # seconds for a solution that has left its tests to end, so that it can be said how
_BEGIN = "import sys; sys.path.append(sys.argv[1]); from players.{0} import main; main(sys.path.pop() + '/job')"
_ENDS = ("exited", "killed", "stopped")  # of a solution that was within its limits
_PLAYERS = ("__init__", "wire", "solution", "tests")
# Real ones: in the room a link's target, of a folder on the way too, is not there.
_ASK = (
    "import os, sys; "
    "print(*map(os.path.realpath, (sys.executable, sys.base_prefix, sys.base_exec_prefix)), sep='\\n')"
)
ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PATH": "/usr/local/bin:/usr/bin:/bin"}


@dataclass(frozen=True)
class Interpreter:
    """The Python that programs run on, with its standard library and nothing else."""

    path: str
    trees: tuple[str, ...]  # what has to be seen of it

    def step(self, code: str, *arguments: str) -> Step:
        """A command that runs `code` on it. Its hashes are the same each time, and so are verdicts."""
        command = [self.path, "-S", "-s", "-P", "-B", "-c", code, *arguments]
        return Step(command, ENVIRONMENT | {"PYTHONHASHSEED": "0"})


def interpreter(path: str | None) -> Interpreter:
    """The one of `path`, or ours. Raises UserError where it is none."""
    try:
        told = subprocess.run(
            [path or sys.executable, "-I", "-c", _ASK], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"sandbox.python={path}: wanted a Python interpreter, found {error}") from error
    executable, *prefixes = told.splitlines()
    trees = sorted({prefix for prefix in prefixes if not prefix.startswith("/usr")})
    return Interpreter(executable, tuple(trees))


def judge(program: Program, *, level: str, limits: Limits, python: Interpreter, group: str = "") -> Verdict:
    """Whether the tests pass, by the word of their own room."""
    to_solution, from_solution = os.pipe(), os.pipe()
    job = json.dumps({"tests": program.tests, "known": program.known})
    try:
        common = Job(level, [], limits, list(python.trees), files={}, players={}, cgroup=group)
        solution = _room("solution", program.source, (to_solution[0], from_solution[1]), common, python)
        tests = _room("tests", job, (from_solution[0], to_solution[1]), common, python)
    finally:
        for descriptor in (*to_solution, *from_solution):
            os.close(descriptor)
    word = ""
    try:
        end = tests.report()
        word = json.loads(end.word.splitlines()[-1]) if end.word else "gone"
    finally:
        gone = solution.stop(GRACE if word == "gone" else 0.0)
    seconds = max(end.seconds, gone.seconds)
    if word.startswith("failed: MemoryError"):
        word = "out of memory"
    if word == "passed" and (end.ended != "exited" or gone.ended not in _ENDS):
        word = "gone"  # a room was ended, by whatever it had too much of
    if word != "gone":
        return Verdict(word == "passed", word, seconds)
    return Verdict(False, reason(end if gone.ended == "stopped" else gone), seconds)


def _room(player: str, job: str, channel: tuple[int, int], common: Job, python: Interpreter) -> Room:
    files = {f"players/{name}.py": _text(HERE / "players" / f"{name}.py") for name in _PLAYERS}
    return Room(
        common._replace(
            steps=[python.step(_BEGIN.format(player), PLAYERS)],
            players=files | {"job": job},
            channel=channel,
            word=player == "tests",
        )
    )


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def reason(report: Report) -> str:
    """Why a program that did not pass has ended, in words."""
    if report.ended == "exited":
        return f"ended with code {report.code} before its tests did"
    if report.ended != "killed":
        return report.ended
    if report.code == signal.SIGXCPU:
        return "timed out"
    if report.code == signal.SIGXFSZ:
        return "too large a file"
    return f"killed by {signal.Signals(report.code).name}"
