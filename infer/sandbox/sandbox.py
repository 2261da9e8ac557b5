"""Untrusted programs judged behind the strongest walls that this machine offers.

Python: the solution runs in one room, its tests in another, and nothing but data passes between them. A
solution that runs in its tests' interpreter can always fake a pass: end the process with code 0, print what a
driver prints, answer with an object that equals everything, patch what the tests compare with. Here it has
nothing of the tests to reach: it returns data, which they compare. Programs of other languages are compiled and
run with their tests in one room.
"""

import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from conf import UserError
from conf.schema import PATH
from infer.sandbox.guard import ProgramLimits, Report, RoomJob
from infer.sandbox.guard.walls import LEVELS
from infer.sandbox.guard.watch import cgroup_parents
from infer.sandbox.languages import ENVIRONMENT, LANGUAGES, NOT_COMPILED, missing_toolchain, right_program

HERE = Path(__file__).parent
PLAYERS = (HERE / "players.py").read_text(encoding="utf-8")
LEAST_MEMORY = 64  # MiB; a Python that has started takes a fifth of it
GRACE = 2.0  # seconds for a solution that has left its tests to end, so that the reason is known
WALLS = {
    "bubblewrap": "namespaces made by bubblewrap: no network, no other process, no files but the system's",
    "namespaces": "namespaces of its own: no network, no other process, no files but the system's",
    "limits": "UNCONFINED: limits only, every file that {user} may read can be read",
}
COUNTED = "counted by looks at processes, sockets and files, since no memory cgroup can be made here"
UNCOUNTED = (
    "counted by looks at processes alone, since no memory cgroup can be made here: memory that no process "
    "shows is not limited"
)
_GUARD = "import sys; sys.path.append('.'); from guard.watch import main; main()"
_WITHIN_LIMITS = ("exited", "killed", "stopped")
_COMPLAINT = re.compile("error|exception|assert|panic|fail", re.IGNORECASE)
# Real paths: in the room a link's target, of a folder on the way too, is not there.
_PATHS = """
import os, sys
print(*map(os.path.realpath, (sys.executable, sys.base_prefix, sys.base_exec_prefix)), sep="\\n")
"""
_TRIAL = """
import json, os, threading
thread = threading.Thread(target=int)
thread.start()
thread.join()
open("own", "w").write("x")
print(json.dumps({"user": os.getuid(), "seen": os.path.exists(OURS)}))
"""


@dataclass
class SandboxConfig:
    """What a program may use, and whether it may run where nothing confines it.

    The limits hold for all processes of a program together, but `file`, which is for each file. MiB where
    not seconds or a number.
    """

    unconfined: bool = False  # run programs even where the machine offers no walls
    wall_seconds: float = 20.0  # seconds on the clock
    cpu_seconds: float = 10.0  # seconds of the CPU
    memory: int = 1024  # MiB of memory, of files too where they lie in memory
    processes: int = 64  # processes at once, threads counted too
    file: int = 64  # MiB of each file
    folder: int = 256  # MiB of all files
    output: float = 1.0  # MiB that it may print
    # the interpreter that Python programs run on; null: ours
    python: str | None = field(default=None, metadata=PATH)

    def __post_init__(self) -> None:
        for name in ProgramLimits._fields:
            if not getattr(self, name) > 0:
                raise ValueError(f"sandbox.{name} must be more than 0, got {getattr(self, name)}")
        if self.memory < LEAST_MEMORY:
            raise ValueError(f"sandbox.memory must be at least {LEAST_MEMORY}, got {self.memory}")


@dataclass(frozen=True, slots=True)
class Program:
    """An untrusted program and the tests it is to pass."""

    language: str  # "python", "cpp", "js", ...: MultiPL-E's names but for Python
    source: str  # untrusted: what stands before the answer, and the answer
    tests: str  # the benchmark's own code that calls it; fails by an exception or a non-zero exit
    known: str = ""  # Python: trusted code with names that tests may use beside the program's


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the tests passed, and if not, why: "failed: AssertionError", "timed out after 20 s", ..."""

    passed: bool
    reason: str
    seconds: float = 0.0


class Room:
    """A guarded room. Its guard is a process of its own with an empty environment."""

    def __init__(self, job: RoomJob) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=job.channel,
            env={"LANG": "C.UTF-8"},
            cwd=HERE,
            start_new_session=True,  # Ctrl-C is for us: the guard ends when we close its input
        )
        assert self._guard.stdin
        self._guard.stdin.write(json.dumps(job).encode() + b"\n")
        self._guard.stdin.flush()

    def report(self) -> Report:
        """Return how it ended, once it has. Raises OSError where it could not be built, or lost its guard."""
        assert self._guard.stdout and self._guard.stderr and self._guard.stdin
        try:
            answer, errors = self._guard.stdout.read(), self._guard.stderr.read()
        finally:
            self._guard.stdin.close()
            self._guard.wait()
        if not answer:
            lines = errors.decode(errors="replace").strip().splitlines()
            raise OSError(f"its guard failed: {lines[-1] if lines else f'code {self._guard.returncode}'}")
        report = Report(*json.loads(answer))
        if report.trouble:
            raise OSError(report.trouble)
        return report

    def stop(self, patience: float = 0.0) -> Report:
        """End it, unless it ends by itself within so many seconds, and return how it stood."""
        assert self._guard.stdin and self._guard.stdout
        select.select([self._guard.stdout], [], [], patience)
        self._guard.stdin.close()
        return self.report()


class Sandbox:
    """Judges programs at one level of confinement, in memory cgroups below `group` if it is not empty.

    Raises UserError where `config.python` is no interpreter.
    """

    def __init__(self, level: str, config: SandboxConfig, group: str = "") -> None:
        self.level, self._config, self._group = level, config, group
        self._python, *trees = _python_paths(config.python)
        self._trees = sorted({tree for tree in trees if not tree.startswith("/usr")})
        limits = ProgramLimits(*(getattr(config, name) for name in ProgramLimits._fields))
        self._job = RoomJob(level, limits, group, bubblewrap=shutil.which("bwrap") or "")

    @property
    def description(self) -> str:
        """The level and the limits, in a line for people."""
        user = "nobody" if os.getuid() == 0 else "this user"
        config = self._config
        counted = UNCOUNTED if self.level == "limits" else COUNTED
        limits = (
            f"{config.cpu_seconds:g} s of computing, {config.wall_seconds:g} s in all, "
            f"{config.processes} processes, {config.memory} MiB of memory "
            f"{'held by a memory cgroup' if self._group else counted}"
        )
        return f"{self.level} ({WALLS[self.level].format(user=user)}; {limits})"

    def judge(self, program: Program) -> Verdict:
        """Judge whether a program passes its tests.

        Raises UserError where its language cannot be judged here, and where a room could not be had twice.
        """
        judge = self._judge_python if program.language == "python" else self._judge_compiled
        with suppress(OSError):
            return judge(program)
        try:
            return judge(program)
        except OSError as error:
            message = f"sandbox: a room ({self.level}) for a program could not be had: {error}"
            raise UserError(message) from error

    def judge_all(self, programs: Sequence[Program], workers: int) -> list[Verdict]:
        """Judge several programs, so many at a time."""
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(self.judge, programs))

    def check(self, language: str) -> None:
        """Raise UserError where a right program of a language does not pass here."""
        if language == "python":  # the sandbox was opened by one
            return
        verdict = self.judge(Program(language, *right_program(language)))
        if not verdict.passed:
            raise UserError(
                f"language {language}: a right program must pass in the sandbox, got {verdict.reason!r}. "
                "Install its tools below /usr, raise sandbox.cpu_seconds, or leave it out"
            )

    def run_python(
        self, arguments: Sequence[str], files: dict[str, str], channel: tuple[int, ...] = ()
    ) -> Room:
        """Open a room in which Python runs with these arguments, its standard library and constant hashes."""
        job = self._job._replace(
            command=[self._python, "-S", "-s", "-P", "-B", *arguments],
            environment=ENVIRONMENT | {"PYTHONHASHSEED": "0"},
            trees=self._trees,
            files=files,
            channel=channel,
        )
        return Room(job)

    def _judge_python(self, program: Program) -> Verdict:
        word = secrets.token_hex(16)
        job = json.dumps({"tests": program.tests, "known": program.known, "word": word})
        to_solution, from_solution = os.pipe(), os.pipe()
        ends = (to_solution[0], from_solution[1]), (from_solution[0], to_solution[1])
        try:
            solution = self._play("solution", {"solution.py": program.source}, ends[0])
            tests = self._play("tests", {"job.json": job}, ends[1])
        finally:
            for descriptor in (*to_solution, *from_solution):
                os.close(descriptor)
        verdict = ""
        try:
            end = tests.report()
            verdict = end.output.rpartition(word)[2] if word in end.output else "gone"
        finally:
            solution_end = solution.stop(GRACE if verdict == "gone" else 0.0)
        seconds = max(end.seconds, solution_end.seconds)
        if verdict.startswith("failed: MemoryError"):
            verdict = "out of memory"
        if verdict == "passed" and (end.ended != "exited" or solution_end.ended not in _WITHIN_LIMITS):
            verdict = "gone"  # a room exceeded a limit
        if verdict == "gone":
            return Verdict(False, _reason(end if solution_end.ended == "stopped" else solution_end), seconds)
        return Verdict(verdict == "passed", verdict, seconds)

    def _play(self, role: str, files: dict[str, str], channel: tuple[int, int]) -> Room:
        arguments = ["players.py", role, *map(str, channel)]
        return self.run_python(arguments, files | {"players.py": PLAYERS}, channel)

    def _judge_compiled(self, program: Program) -> Verdict:
        """Judge by how it ends, having printed at the end of its tests what only they could know."""
        if missing := missing_toolchain(program.language):
            lack = f"cannot be judged on this machine: {missing} is missing"
            raise UserError(f"language {program.language} {lack}")
        language, word = LANGUAGES[program.language], secrets.token_hex(16)
        script, environment, trees = language.script()
        files = {language.file: program.source + language.mark(program.tests, word)}
        job = self._job._replace(
            command=["/bin/sh", "-c", script],
            environment=environment,
            trees=trees,
            files=files,
            address_space=language.address_space,
        )
        report = Room(job).report()
        done = report.ended == "exited" and report.code == 0 and word in report.output
        if done and not (language.fails and language.fails in report.output):
            return Verdict(True, "passed", report.seconds)
        if report.ended == "exited" and report.code == NOT_COMPILED:
            return Verdict(False, "does not compile", report.seconds)
        if done or report.ended == "exited" and report.code:  # the line in which it says what went wrong
            lines = (line.strip() for line in report.output.splitlines())
            complaint = next((line for line in lines if _COMPLAINT.search(line)), f"code {report.code}")
            return Verdict(False, f"failed: {complaint[:200]}", report.seconds)
        return Verdict(False, _reason(report), report.seconds)


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """Open a sandbox at the strongest level at which a program ran. Raises UserError where none is allowed."""
    refused: list[str] = []
    for level in LEVELS:
        if level == "bubblewrap" and not shutil.which("bwrap"):
            continue
        if level == "limits" and not config.unconfined:
            raise UserError(
                "sandbox.unconfined must be true where nothing confines the programs that are judged, got "
                f"false. Refused here: {'; '.join(refused)}"
            )
        for group in (*cgroup_parents(), ""):
            sandbox = Sandbox(level, config, group)
            trouble = try_sandbox(sandbox)
            if not trouble:
                return sandbox
        refused.append(f"{level}: {trouble}")
    raise UserError(f"sandbox: this machine cannot limit programs ({'; '.join(refused)})")


def try_sandbox(sandbox: Sandbox) -> str:
    """Run a program that tries what it must be able to do, and what not; return why the level does not hold."""
    with tempfile.NamedTemporaryFile() as ours:
        try:
            report = sandbox.run_python(["-c", _TRIAL.replace("OURS", repr(ours.name))], {}).report()
        except OSError as error:
            return str(error)
    if report.ended != "exited" or report.code:
        return (report.output.strip().splitlines() or [_reason(report)])[-1]
    facts = json.loads(report.output)
    if facts["user"] == 0 or facts["seen"] and sandbox.level != "limits":
        return f"a program in it is user {facts['user']} and sees the machine's files"
    return ""


@cache
def _python_paths(path: str | None) -> list[str]:
    try:
        command = [path or sys.executable, "-I", "-c", _PATHS]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"sandbox.python must be a Python interpreter, got {path}: {error}") from error


def _reason(report: Report) -> str:
    if report.ended == "exited":
        return f"ended with code {report.code} before its tests did"
    if report.ended != "killed":
        return report.ended
    words = {signal.SIGXCPU: "timed out", signal.SIGXFSZ: "too large a file"}
    return words.get(report.code) or f"killed by {signal.Signals(report.code).name}"  # type: ignore[call-overload]
