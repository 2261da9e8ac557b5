"""The strongest walls that this machine offers, and programs judged behind them."""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from conf import UserError
from infer.sandbox import compiled, python, right
from infer.sandbox.config import SandboxConfig
from infer.sandbox.guard import cgroup
from infer.sandbox.guard.job import Job, Report
from infer.sandbox.guard.rooms import LEVELS
from infer.sandbox.program import Program, Verdict
from infer.sandbox.python import Interpreter
from infer.sandbox.room import Room

WALLS = {
    "bubblewrap": "namespaces made by bubblewrap: no network, no other process, no files but the system's",
    "namespaces": "namespaces of its own: no network, no other process, no files but the system's",
    "limits": "UNCONFINED: limits only, every file that {user} may read can be read",
}
MEMORY_COUNTED = {
    "bubblewrap": "counted by looks at processes, sockets and files, since no memory cgroup can be made here",
    "namespaces": "counted by looks at processes, sockets and files, since no memory cgroup can be made here",
    "limits": "counted by looks at processes alone, since no memory cgroup can be made here: memory that no "
    "process shows is not limited",
}
_TRIAL = """
import json, os, threading
thread = threading.Thread(target=int)
thread.start()
thread.join()
open("own", "w").write("x")
print(json.dumps({"user": os.getuid(), "seen": os.path.exists(OURS)}))
"""


class Sandbox:
    """Judges programs at one level of confinement, in memory cgroups below `group` if it is not empty."""

    def __init__(self, level: str, config: SandboxConfig, interpreter: Interpreter, group: str = "") -> None:
        self.level = level
        self._config, self._limits, self._python, self._group = config, config.limits(), interpreter, group

    @property
    def told(self) -> str:
        """The level and the limits, in a line for people."""
        user = "nobody" if os.getuid() == 0 else "this user"
        config = self._config
        memory = "held by a memory cgroup" if self._group else MEMORY_COUNTED[self.level]
        limits = (
            f"{config.cpu_seconds:g} s of computing, {config.wall_seconds:g} s in all, "
            f"{config.processes} processes, {config.memory} MiB of memory {memory}"
        )
        return f"{self.level} ({WALLS[self.level].format(user=user)}; {limits})"

    def judge(self, program: Program) -> Verdict:
        """Whether a program passes its tests.

        Raises UserError where its language cannot be judged here, `missing_toolchain` says so before, and
        where a room for it could not be had twice: a machine may be short of something for a while.
        """
        with suppress(OSError):
            return self._judge(program)
        try:
            return self._judge(program)
        except OSError as error:
            raise UserError(f"sandbox: wanted a room ({self.level}) for a program, found {error}") from error

    def _judge(self, program: Program) -> Verdict:
        if program.language == "python":
            return python.judge(
                program, level=self.level, limits=self._limits, python=self._python, group=self._group
            )
        return compiled.judge(program, level=self.level, limits=self._limits, group=self._group)

    def judge_all(self, programs: Sequence[Program], workers: int) -> list[Verdict]:
        """The verdicts on several, so many at a time."""
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(self.judge, programs))

    def check(self, language: str) -> None:
        """Raises UserError where a right program of a language does not pass here."""
        if language == "python":  # the sandbox was opened by one
            return
        verdict = self.judge(right.program(language))
        if not verdict.passed:
            raise UserError(
                f"language {language}: wanted a right program to pass in the sandbox, found it "
                f"{verdict.reason!r}: install its tools below /usr, raise sandbox.cpu_seconds, or leave it out"
            )

    def trial(self) -> Report:
        """Runs a program that tries what it must be able to do, and what not. Raises OSError where no room
        can be had.
        """
        trees = list(self._python.trees)
        with tempfile.NamedTemporaryFile() as ours:
            step = self._python.step(_TRIAL.replace("OURS", repr(ours.name)))
            job = Job(self.level, [step], self._limits, trees, files={}, players={}, cgroup=self._group)
            return Room(job).report()


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """A sandbox at the strongest level at which a program could really be run.

    Raises UserError where that is none, or none that confines and it is not said that this will do.
    """
    interpreter = python.interpreter(config.python)
    refused: list[str] = []
    for level in LEVELS if shutil.which("bwrap") else [level for level in LEVELS if level != "bubblewrap"]:
        if level == "limits" and not config.unconfined:
            raise UserError(
                "sandbox.unconfined: wanted true where nothing confines the programs that are judged, found "
                f"false (refused here: {'; '.join(refused)})"
            )
        for group in (*cgroup.parents(), ""):
            sandbox = Sandbox(level, config, interpreter, group)
            trouble = _trouble(sandbox)
            if not trouble:
                return sandbox
        refused.append(f"{level}: {trouble}")
    raise UserError(f"sandbox: wanted a machine that can limit programs, found {'; '.join(refused)}")


def _trouble(sandbox: Sandbox) -> str:
    """Why a level does not hold here; nothing where it does."""
    try:
        report = sandbox.trial()
    except OSError as error:
        return str(error)
    if report.ended != "exited" or report.code:
        return (report.output.strip().splitlines() or [python.reason(report)])[-1]
    facts = json.loads(report.output)
    if facts["user"] == 0 or facts["seen"] and sandbox.level != "limits":
        return f"a program in it is user {facts['user']} and sees the machine's files"
    return ""
