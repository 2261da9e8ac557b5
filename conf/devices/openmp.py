"""Shorten the busy-waiting of OpenMP threads while other programs need the cores.

PyTorch runs each operation on a CPU by several OpenMP threads. A thread that has finished its part spins until
the next operation. libgomp, the OpenMP library in PyTorch's wheels for Linux, lets it spin for 300,000
iterations, some milliseconds, before it sleeps. On an idle machine that is fastest, since waking a thread is
slow. If other programs use the cores, spinning threads keep the computing threads off the cores, and decoding
runs at a third to a tenth of its speed.

libgomp spins for only 100 iterations while it manages more threads than there are cores. `watch` adds enough
sleeping threads while other programs need the cores (tests/benchmarks/busy.py). The number of computing threads
does not change, so results stay bit-identical.
"""

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

#: If one of these variables is set, the user's choice holds and `watch` does nothing.
OWN_CHOICE = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
INTERVAL = 0.25  # seconds between two measurements of the load
# Missing cores (fractional) above which spinning stops, and below which it starts again.
CONTENDED, FREE = 0.3, 0.15
STAT = Path("/proc/stat")
_LOCK = threading.Lock()
_started = False


def watch(threads: int) -> None:
    """Start a thread that lets waiting OpenMP threads sleep while other programs need the cores.

    `threads` is the number of computing threads. No-op for one thread, if the user has set GOMP_SPINCOUNT or
    OMP_WAIT_POLICY, if OpenMP is not libgomp, and if the watch runs already.
    """
    global _started
    decided = any(name in os.environ for name in OWN_CHOICE)
    if threads < 2 or decided or not STAT.is_file():
        return
    with _LOCK:
        library = None if _started else libgomp()
        if library is None:
            return
        _started = True
        run = Watch(library, threads).run
        threading.Thread(target=run, name="openmp-watch", daemon=True).start()
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    # A forked process has only the thread that forked.
    global _started
    _started = False


def libgomp() -> ctypes.CDLL | None:
    """Return the libgomp that this process has loaded, or None."""
    maps = Path("/proc/self/maps")
    if sys.platform != "linux" or not maps.is_file():
        return None
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.partition("/")[2]
        if Path(path).name.startswith("libgomp"):
            return ctypes.CDLL(f"/{path}")
    return None


class Watch:
    """Measures the load of the cores, and holds extra threads while other programs need them."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._held: threading.Event | None = None

    def run(self) -> None:
        """Measure the load of the cores every INTERVAL seconds, and hold or release the extra threads."""
        cores = os.sched_getaffinity(0)
        before = (busy_seconds(cores), time.process_time(), time.monotonic())
        while True:
            time.sleep(INTERVAL)
            now = (busy_seconds(cores), time.process_time(), time.monotonic())
            busy, own, passed = (after - first for after, first in zip(now, before))
            before = now
            self.decide((busy - own) / passed, len(cores))

    def decide(self, other_load: float, cores: int) -> None:
        """Hold extra threads if too few cores are left, else release them.

        `other_load` is the number of cores (fractional) that other programs use, `cores` the number of all
        cores.
        """
        lacking = other_load + self._threads - cores
        if self._held is None and lacking > CONTENDED:
            self._held = threading.Event()
            count = max(2, cores - self._threads + 2)
            arguments = (self._library, count, self._held)
            threading.Thread(target=hold, args=arguments, daemon=True).start()
        elif self._held is not None and lacking < FREE:
            self._held.set()
            self._held = None

    @property
    def holds(self) -> bool:
        """True while extra threads are held, so that waiting threads sleep."""
        return self._held is not None


def hold(library: ctypes.CDLL, count: int, released: threading.Event) -> None:
    """Make libgomp manage `count - 1` more threads until the event is set.

    The threads belong to the calling thread and end with it. They run one function without effect.
    """
    library.GOMP_parallel(library.omp_get_thread_num, None, count, 0)
    released.wait()


def busy_seconds(cores: set[int], stat: str | None = None) -> float:
    """Return the CPU seconds that these cores have been busy since the machine started.

    `stat` is the text of /proc/stat, which is read by default. Time stolen by a hypervisor does not count.
    """
    if stat is None:
        stat = STAT.read_text(encoding="ascii")
    ticks = 0
    for line in stat.splitlines():
        name, _, values = line.partition(" ")
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _, _, interrupt, soft, *_ = map(int, values.split())
            ticks += user + nice + system + interrupt + soft
    return ticks / os.sysconf("SC_CLK_TCK")
