"""The guard of one room: starts it, counts what it uses, ends it and reports.

It stands outside, where programs cannot see it. One line of JSON with the job comes on standard input, one with
the report goes to standard output. When standard input ends, the sandbox wants no more or is gone: then the
room ends too.
"""

import json
import os
import re
import select
import signal
import sys
import time
from contextlib import suppress
from typing import NamedTuple

from . import BOX, Report, RoomJob
from .walls import FOLDER_FILES, OWN, READY, adopt_orphans, exit_code, start

TICK = 0.02  # seconds between two looks, on average: a program must not foresee them
LONG_TICK = 0.2  # between two looks at files
BUILDING = 60.0  # seconds that a room may take to be built
OUT_OF_MEMORY = "out of memory"
CGROUP = "adaptive-sandbox-"
PATIENCE = 2.0  # seconds until a cgroup whose processes have ended can be removed
_CHUNK = 1 << 16
_TICKS = os.sysconf("SC_CLK_TCK")
_MEMORY = re.compile(r"^Vm(?:RSS|Swap|PTE):\s*(\d+) kB$", re.MULTILINE)
_SEND_BUFFER = 212992  # bytes, where a container does not say


def main() -> None:
    """Serve one job."""
    adopt_orphans()
    job = RoomJob.read(sys.stdin.readline())
    try:
        report = _serve(job)
    except OSError as error:
        report = Report("not built", trouble=str(error))
    print(json.dumps(report))


def _serve(job: RoomJob) -> Report:
    group = create_cgroup(job.cgroup, job.limits.memory << 20) if job.cgroup else ""
    folder = BOX
    if job.level == "limits":
        import tempfile  # slow, and seldom needed

        folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
        return Guard(job._replace(cgroup=group), folder).watch()
    finally:
        end_all()
        if group:
            _remove_cgroup(group)
        if job.level == "limits":  # whatever rights its owner took from itself, and however deep it is
            for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
                os.spawnvpe(os.P_WAIT, command[0], command, {"PATH": os.defpath})


class Guard:
    """Starts a room in `folder` and watches it."""

    def __init__(self, job: RoomJob, folder: str) -> None:
        self._job, self._folder = job, folder
        self._output, output = os.pipe()
        self._ready, ready = os.pipe()
        woken, wake = os.pipe()  # readable when a child has ended
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake)
        self._heard = {self._output: bytearray(), self._ready: bytearray(), woken: bytearray()}
        self._open = [*self._heard, 0]
        self._opened, self._begun = time.monotonic(), 0.0
        self._next_look, self._time = 0.0, ProcessorTime()
        self._looked, self._disk = 0.0, DiskUsage()
        self._room = start(job, folder, output, ready)
        for descriptor in (output, ready, *job.channel):
            os.close(descriptor)

    def watch(self) -> Report:
        """Watch until it ends, exceeds a limit or is given up. Raises OSError if it could not be built."""
        ended, status = "", None
        while not ended:
            stopped = 0 in self._read(max(0.0, self._next_look - time.monotonic()))
            status = self._reap()
            if status is not None:
                ended = "exited"
            elif stopped:
                ended = self._excess(last=True) or "stopped"
            elif time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + 2 * TICK * int.from_bytes(os.urandom(2)) / 0xFFFF
                ended = self._excess()
            elif self._flooded():
                ended = "too much output"
        seconds = time.monotonic() - (self._begun or self._opened)
        end_all()
        if self._job.cgroup and out_of_memory_events(self._job.cgroup):
            ended = OUT_OF_MEMORY
        self._open = [descriptor for descriptor in self._open if descriptor]
        while self._read(0.0) and self._open and not self._flooded():
            continue  # what was written before the end
        output = self._heard[self._output].decode(errors="replace")
        if ended == "exited" and self._heard[self._ready] != READY:
            raise OSError((self._heard[self._ready].decode(errors="replace") or output).strip()[-500:])
        code = exit_code(status or 0)
        if ended == "exited" and code - 128 in signal.valid_signals():
            ended, code = "killed", code - 128
        return Report(ended, code, output, seconds)

    def _read(self, seconds: float) -> list[int]:
        """Read what comes within so many seconds; return the descriptors that had something or have ended."""
        ready = select.select(self._open, [], [], seconds)[0]
        for descriptor in ready:
            data = os.read(descriptor, _CHUNK)
            if not data:
                self._open.remove(descriptor)
            elif descriptor:
                self._heard[descriptor] += data
        if not self._begun and self._heard[self._ready] == READY:
            self._begun = time.monotonic()
        return ready

    def _reap(self) -> int | None:
        """Wait for children that have ended, orphans too; return the room's status if it is among them."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in (0, self._room):
                return status if pid else None

    def _flooded(self) -> bool:
        return len(self._heard[self._output]) > self._job.limits.output * (1 << 20)

    def _excess(self, *, last: bool = False) -> str:
        now, limits = time.monotonic(), self._job.limits
        if not self._begun:
            if now - self._opened > BUILDING:
                raise OSError(f"the room was not ready after {BUILDING:g} s")
            return ""
        pids = descendants(os.getpid())
        processes = [process for process in map(_process, pids) if process]
        waited = sum(os.times()[2:4])  # for children of ours that have ended
        cpu_seconds = self._time.add([*processes, Process(0, 0, False, 0.0, waited, 0)], now)
        if sum(process.tasks for process in processes) - OWN[self._job.level] >= limits.processes:
            return "too many processes"
        if now - self._begun > limits.wall_seconds:
            return f"timed out after {limits.wall_seconds:g} s"
        if cpu_seconds > limits.cpu_seconds:
            return f"timed out after {limits.cpu_seconds:g} s of computing"
        if last or now - self._looked > LONG_TICK:
            inside = self._job.level != "limits"
            self._looked = now
            self._disk = file_system_usage(pids, BOX) if inside else tree_usage(self._folder)
        if self._out_of_memory(pids):
            return OUT_OF_MEMORY
        full = self._disk.size_bytes > limits.folder << 20 or self._disk.files > FOLDER_FILES
        return "too much on disk" if full else ""

    def _out_of_memory(self, pids: list[int]) -> bool:
        if self._job.cgroup:
            return out_of_memory_events(self._job.cgroup) > 0
        used = sum(map(memory, pids))
        if self._job.level != "limits" and len(pids) > 1:  # network and file system are in memory of its own
            used += socket_memory(pids[1]) + self._disk.size_bytes
        return used > self._job.limits.memory << 20


class Process(NamedTuple):
    """A process at a moment."""

    pid: int
    started: int  # with the pid a name that no other process has
    running: bool  # or it has several threads, of which one may run
    own_seconds: float  # of the CPU, by its own threads
    waited_seconds: float  # by its children that ended and were waited for, and theirs
    tasks: int  # threads


def _process(pid: int) -> Process | None:
    try:
        state, *fields = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return None
    own, waited = (sum(map(int, fields[start : start + 2])) / _TICKS for start in (10, 12))
    return Process(pid, int(fields[18]), state == "R" or int(fields[16]) > 1, own, waited, int(fields[16]))


class ProcessorTime:
    """The CPU seconds of all processes of a program: the larger of two counts.

    The kernel adds the seconds of ended children to the process that waits for them. That is exact, but loses
    children whose parent ignores SIGCHLD. So we also add what each process was seen to use from look to look. A
    new running process counts for the time since the last look: one of d seconds is seen with probability d / t
    between looks t seconds apart, and then counts for t, which is d on average. This needs looks at times that
    the program cannot foresee.
    """

    def __init__(self) -> None:
        self._seen_seconds = 0.0
        self._before: dict[tuple[int, int], float] = {}
        self._looked: float | None = None
        self._processors = len(os.sched_getaffinity(0))

    def add(self, processes: list[Process], now: float) -> float:
        """Return the seconds so far, with what a look at time `now` shows."""
        elapsed = 0.0 if self._looked is None else now - self._looked
        own = {(process.pid, process.started): process.own_seconds for process in processes}
        new = sum(process.running and process[:2] not in self._before for process in processes)
        self._seen_seconds += sum(own[name] - self._before[name] for name in own.keys() & self._before.keys())
        self._seen_seconds += min(new, self._processors) * elapsed
        self._before, self._looked = own, now
        known = sum(process.own_seconds + process.waited_seconds for process in processes)
        return max(self._seen_seconds, known)


def descendants(pid: int) -> list[int]:
    """Return all processes below one, parents first."""
    pids = [pid]
    for parent in pids:
        with suppress(OSError):  # it ended while it was read
            for thread in os.listdir(f"/proc/{parent}/task"):
                pids += map(int, _read_text(f"/proc/{parent}/task/{thread}/children").split())
    return pids[1:]


def end_all() -> None:
    """Kill all descendants, until none is left: orphans become children of this process."""
    while True:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.001)


def memory(pid: int) -> int:
    """Return the bytes of a process: resident, swapped, page tables. Shared pages count for each process."""
    with suppress(OSError):  # it ended while it was read
        for thread in os.listdir(f"/proc/{pid}/task"):
            sizes = _MEMORY.findall(_read_text(f"/proc/{pid}/task/{thread}/status"))
            if sizes:  # the first thread may have ended: the others have the memory
                return sum(map(int, sizes)) << 10
    return 0


def socket_memory(pid: int) -> int:
    """Return the bytes that sockets of a process's network namespace can hold: at most two buffers each."""
    buffer = _SEND_BUFFER
    with suppress(FileNotFoundError):
        buffer = int(_read_text("/proc/sys/net/core/wmem_default"))
    try:
        count = int(_read_text(f"/proc/{pid}/net/sockstat").split()[2])  # "sockets: used 2"
    except OSError:  # the process has ended
        return 0
    return count * 2 * buffer


class DiskUsage(NamedTuple):
    """What a file system or a folder holds."""

    size_bytes: int = 0
    files: int = 0


def file_system_usage(pids: list[int], path: str) -> DiskUsage:
    """Return what the file system at a path holds, in the view of one of the processes."""
    for pid in reversed(pids):
        with suppress(OSError):  # the process has ended, or has another view
            status = os.statvfs(f"/proc/{pid}/root{path}")
            size = (status.f_blocks - status.f_bfree) * status.f_frsize
            return DiskUsage(size, status.f_files - status.f_ffree)
    return DiskUsage()


def tree_usage(path: str) -> DiskUsage:
    """Return what lies below a folder, as `du` does: folders may be nested deeper than a path can name."""
    import subprocess  # slow, and seldom needed

    counts = []
    for unit in ("--block-size=1", "--inodes"):
        lines = subprocess.run(["du", "-s", unit, path], capture_output=True, text=True, check=False).stdout
        counts.append(int(lines.split()[0]) if lines else 0)
    return DiskUsage(*counts)


# A memory cgroup holds the limit for all kinds of memory. Beside the pages of processes it counts what no
# process shows: shared memory without a mapping, files in memory, buffers of sockets and pipes, page tables.
# Most containers and users have no cgroup that they may write to: then the guard counts what it can see.
_LIMITS = {  # what the limits of memory, and of memory and swap, are called in versions 2 and 1
    "memory.max": ("memory.swap.max", "memory.events"),
    "memory.limit_in_bytes": ("memory.memsw.limit_in_bytes", "memory.oom_control"),
}


def cgroup_parents() -> list[str]:
    """Return the folders of cgroups below which this process may try to make others.

    In version 1 our own, which is the mounted root in a container that sees its own part alone; in version 2
    our own or the one above, since a cgroup either holds processes or passes controllers on to its children.
    """
    parents = []
    for line in _read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            parents += [f"/sys/fs/cgroup/memory{path}", "/sys/fs/cgroup/memory"]
        elif not controllers:
            parents += [f"/sys/fs/cgroup{path}", f"/sys/fs/cgroup{os.path.dirname(path)}"]
    return [parent for parent in dict.fromkeys(parents) if os.access(f"{parent}/cgroup.procs", os.W_OK)]


def create_cgroup(parent: str, memory_bytes: int) -> str:
    """Make a cgroup with this limit and return its folder. Raises OSError where the kernel refuses it."""
    for name in os.listdir(parent):  # of guards that were killed
        if name.startswith(CGROUP) and not os.path.exists(f"/proc/{name.removeprefix(CGROUP)}"):
            with suppress(OSError):  # it belongs to another container's guard
                os.rmdir(f"{parent}/{name}")
    folder = f"{parent}/{CGROUP}{os.getpid()}"
    os.mkdir(folder)
    try:
        for limit, (swap, _) in _LIMITS.items():
            if os.path.exists(f"{folder}/{limit}"):
                _write(f"{folder}/{limit}", memory_bytes)
                if os.path.exists(f"{folder}/{swap}"):
                    _write(f"{folder}/{swap}", 0 if limit == "memory.max" else memory_bytes)
        out_of_memory_events(folder)
    except OSError:
        os.rmdir(folder)
        raise
    return folder


def out_of_memory_events(folder: str) -> int:
    """Return how many processes the kernel has ended because of a cgroup's limit."""
    for _, events in _LIMITS.values():
        with suppress(FileNotFoundError):
            counts = dict(line.split() for line in _read_text(f"{folder}/{events}").splitlines())
            return int(counts["oom_kill"])
    raise OSError(f"{folder} does not count processes that were ended for memory")


def _remove_cgroup(folder: str) -> None:
    """Remove a cgroup whose processes have ended. The kernel may need a moment to see that they have."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:  # afterwards a later guard removes it: an empty cgroup does no harm
        with suppress(OSError):
            os.rmdir(folder)
            return
        time.sleep(0.01)


def _read_text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _write(path: str, value: int) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(str(value))
