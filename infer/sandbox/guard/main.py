"""The guard of one room: has it built, watches what happens in it, and ends it.

Stands outside, where programs cannot see it. One line of JSON with the job comes on standard input, one
with the report goes to standard output. When standard input ends, whoever asked wants no more or is gone:
then the room ends too.
"""

import json
import os
import select
import sys
import time
from typing import Any

from . import kernel, rooms, walls
from .job import Job, Report
from .watch import descendants, end_all, usage

TICK = 0.02  # seconds between two looks
LONG_TICK = 0.2  # between two looks at files
BUILDING = 60.0  # seconds that a room may take to be built
_CHUNK = 1 << 16


def main() -> None:
    """Serve one job."""
    kernel.adopt_orphans()
    job = Job.read(os.fdopen(0, "rb", buffering=0, closefd=False).readline().decode())
    try:
        with rooms.opened(job) as room:
            report = Guard(job, room).watch()
    except OSError as error:
        report = Report("not built", trouble=str(error))
    sys.stdout.write(report.text())


class Guard:
    """Watches one room."""

    def __init__(self, job: Job, room: rooms.Room) -> None:
        self._job, self._room = job, room
        self._heard = {fd: bytearray() for fd in (room.told, room.output, room.word)}
        self._open = [*self._heard, 0]
        self._opened = time.monotonic()
        self._begun: float | None = None
        self._looked = 0.0

    def watch(self) -> Report:
        """Until it has ended, or had too much of something, or is not wanted any more.

        Raises OSError where the room could not be built.
        """
        ended = ""
        while not ended:
            ready = self._take(TICK)
            if self._room.told not in self._open:
                ended = "exited"
            else:
                ended = "stopped" if 0 in ready else self._excess()
        seconds = time.monotonic() - (self._begun or self._opened)
        end_all()
        self._open = [descriptor for descriptor in self._open if descriptor]
        while self._take(0.0) and not self._flooded():
            continue  # what was written before the end
        return self._report(ended, seconds)

    def _take(self, seconds: float) -> list[int]:
        """Read what has come, waiting for it so long; the descriptors that had something or have ended."""
        ready = select.select(self._open, [], [], seconds)[0]
        for descriptor in ready:
            data = os.read(descriptor, _CHUNK)
            if not data:
                self._open.remove(descriptor)
            elif descriptor:
                self._heard[descriptor] += data
        if self._begun is None and self._heard[self._room.told]:
            self._begun = time.monotonic()
        return ready

    def _flooded(self) -> bool:
        return max(len(heard) for heard in self._heard.values()) > self._job.limits.output_bytes

    def _excess(self) -> str:
        """What there is too much of, in words; nothing if there is not."""
        now, limits = time.monotonic(), self._job.limits
        if self._begun is None:
            if now - self._opened > BUILDING:
                raise OSError(f"the room was not ready after {BUILDING:g} s")
            return ""
        used = usage(descendants(os.getpid()))
        if used.tasks - self._room.own >= limits.processes:
            return "too many processes"
        if now - self._begun > limits.wall_seconds:
            return f"timed out after {limits.wall_seconds:g} s"
        if used.cpu_seconds > limits.cpu_seconds:
            return f"timed out after {limits.cpu_seconds:g} s of computing"
        if used.memory_bytes > limits.memory_bytes:
            return "out of memory"
        if self._flooded():
            return "too much output"
        return self._too_full(now)

    def _too_full(self, now: float) -> str:
        if self._room.folder is None or now - self._looked < LONG_TICK:
            return ""
        self._looked, size, count = now, 0, 0
        for root, folders, files in os.walk(self._room.folder):
            for name in (*folders, *files):
                try:
                    size += os.lstat(f"{root}/{name}").st_blocks * 512
                except FileNotFoundError:
                    continue
                count += 1
        full = size > self._job.limits.folder_bytes or count > walls.FOLDER_FILES
        return "too much on disk" if full else ""

    def _report(self, ended: str, seconds: float) -> Report:
        facts: dict[str, Any] = {}
        for line in self._heard[self._room.told].splitlines():
            facts |= json.loads(line)
        if "trouble" in facts and "step" not in facts:
            raise OSError(facts["trouble"])
        code: int = facts.get("code", 0)
        if ended == "exited" and "code" not in facts:
            ended = "killed with its steward"
        elif ended == "exited" and code < 0:
            ended, code = "killed", -code
        output, word = (
            bytes(self._heard[fd]).decode(errors="replace") for fd in (self._room.output, self._room.word)
        )
        return Report(ended, code, facts.get("step", 0), output, word, seconds)
