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

from . import cgroup, kernel, rooms, walls
from .job import BOX, Job, Report
from .watch import (
    FolderUsage,
    ProcessorTime,
    descendants,
    end_all,
    folder_usage,
    look,
    memory,
    socket_memory,
    tree_usage,
)

TICK = 0.02  # seconds between two looks, on average: a program must not foresee them
LONG_TICK = 0.2  # between two looks at files
BUILDING = 60.0  # seconds that a room may take to be built
OUT_OF_MEMORY = "out of memory"
_CHUNK = 1 << 16


def main() -> None:
    """Serve one job."""
    kernel.clear_command_line()
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
        self._next_look, self._time = 0.0, ProcessorTime()
        self._looked, self._files = 0.0, FolderUsage()

    def watch(self) -> Report:
        """Until it has ended, or had too much of something, or is not wanted any more.

        Raises OSError where the room could not be built.
        """
        ended = ""
        while not ended:
            ready = self._take(max(0.0, self._next_look - time.monotonic()))
            if self._room.told not in self._open:
                ended = "exited"
            elif 0 in ready:
                ended = self._excess(last=True) or "stopped"
            elif time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + 2 * TICK * int.from_bytes(os.urandom(2)) / 0xFFFF
                ended = self._excess()
            elif self._flooded():
                ended = "too much output"
        seconds = time.monotonic() - (self._begun or self._opened)
        end_all()
        if self._room.cgroup and cgroup.ran_out_of_memory(self._room.cgroup):
            ended = OUT_OF_MEMORY
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

    def _excess(self, *, last: bool = False) -> str:
        """What there is too much of, in words; nothing if there is not. The last look leaves nothing out."""
        now, limits = time.monotonic(), self._job.limits
        if self._begun is None:
            if now - self._opened > BUILDING:
                raise OSError(f"the room was not ready after {BUILDING:g} s")
            return ""
        pids = descendants(os.getpid())
        processes = look(pids)
        cpu_seconds = self._time.add(processes, now)
        if sum(process.tasks for process in processes) - self._room.own >= limits.processes:
            return "too many processes"
        if now - self._begun > limits.wall_seconds:
            return f"timed out after {limits.wall_seconds:g} s"
        if cpu_seconds > limits.cpu_seconds:
            return f"timed out after {limits.cpu_seconds:g} s of computing"
        if last or now - self._looked > LONG_TICK:
            self._looked, self._files = now, self._count_files(pids)
        if self._out_of_memory(pids):
            return OUT_OF_MEMORY
        full = self._files.size_bytes > limits.folder_bytes or self._files.files > walls.FOLDER_FILES
        return "too much on disk" if full else ""

    def _count_files(self, pids: list[int]) -> FolderUsage:
        if self._room.folder is None:
            return folder_usage(reversed(pids), BOX)
        return tree_usage(self._room.folder)

    def _out_of_memory(self, pids: list[int]) -> bool:
        if self._room.cgroup:
            return cgroup.ran_out_of_memory(self._room.cgroup)
        used = memory(pids)
        if (
            self._job.level != "limits" and len(pids) >= self._room.own
        ):  # with a network and a memory file system
            used += socket_memory(pids[self._room.own - 1]) + self._files.size_bytes
        return used > self._job.limits.memory_bytes

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
