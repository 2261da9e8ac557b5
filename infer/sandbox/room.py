"""A room as its user sees it: a job given to a guard, and the guard's report.

The guard is a process of its own, with an empty environment, that needs only the standard library: it starts
in a few hundredths of a second.
"""

import select
import shutil
import subprocess
import sys
from pathlib import Path

from infer.sandbox.guard.job import Job, Report

HERE = Path(__file__).parent
_BEGIN = "import sys; sys.path.append(sys.argv[1]); from guard.main import main; main()"
_LOCAL = {"LANG": "C.UTF-8"}


class Room:
    """One guarded room, from the start of its first step."""

    def __init__(self, job: Job) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BEGIN, str(HERE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=job.channel or (),
            env=_LOCAL,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for us: the guard ends when we hang up
        )
        assert self._guard.stdin
        if job.level == "bubblewrap":
            job = job._replace(tool=shutil.which("bwrap") or "bwrap")
        self._guard.stdin.write(job.text().encode())
        self._guard.stdin.flush()

    def report(self) -> Report:
        """How it ended, once it has. Raises OSError where it could not be built, or lost its guard."""
        assert self._guard.stdout and self._guard.stderr and self._guard.stdin
        try:
            told, trouble = self._guard.stdout.read(), self._guard.stderr.read()
        finally:
            self._guard.stdin.close()
            self._guard.wait()
        if not told:
            lines = trouble.decode(errors="replace").strip().splitlines()
            raise OSError(f"its guard failed: {lines[-1] if lines else f'code {self._guard.returncode}'}")
        report = Report.read(told.decode())
        if report.trouble:
            raise OSError(report.trouble)
        return report

    def stop(self, patience: float = 0.0) -> Report:
        """End it, if it does not end by itself within so many seconds, and say how it stood."""
        assert self._guard.stdin and self._guard.stdout
        select.select([self._guard.stdout], [], [], patience)
        self._guard.stdin.close()
        return self.report()
