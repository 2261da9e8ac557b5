"""How long OpenMP's threads spin while they wait: PyTorch's operations on a CPU are shared by such threads.

A thread that has finished its part of an operation waits for the next one. libgomp, the OpenMP of PyTorch's
wheels for Linux, has it spin for 300,000 turns, some milliseconds, before it sleeps. On a quiet machine that is
fastest, since waking a thread takes long; beside other programs the spinning threads take the cores from the
threads that they wait for, and decoding falls to a third or a tenth.

libgomp spins for 100 turns only while it manages more threads than there are cores. `watch` gives it such a
number of threads, asleep, for as long as other programs need the cores (tests/benchmarks/busy.py). The threads
that compute stay as many, and so does every result, bit for bit.
"""

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

#: Variables by which users decide it themselves.
OWN_CHOICE = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
INTERVAL = 0.25  # seconds between two looks at the cores
# Cores that others may use beyond the free ones before threads stop to spin, and start again.
CONTENDED, FREE = 0.3, 0.15
STAT = Path("/proc/stat")
_LOCK = threading.Lock()
_started = False


def watch(threads: int) -> None:
    """Let this process's waiting threads sleep while other programs need the cores.

    `threads` is the number that computes. Does nothing for one thread, where the user has set GOMP_SPINCOUNT or
    OMP_WAIT_POLICY, and where OpenMP is not libgomp. Repeated calls are free.
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
        look = Watch(library, threads).run
        threading.Thread(target=look, name="openmp-watch", daemon=True).start()
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    # A forked process has none of its parent's threads.
    global _started
    _started = False


def libgomp() -> ctypes.CDLL | None:
    """Return the libgomp that this process has loaded; None without one."""
    maps = Path("/proc/self/maps")
    if sys.platform != "linux" or not maps.is_file():
        return None
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.partition("/")[2]
        if Path(path).name.startswith("libgomp"):
            return ctypes.CDLL(f"/{path}")
    return None


class Watch:
    """Looks at the cores' load, and holds threads while others need them."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._held: threading.Event | None = None

    def run(self) -> None:
        """Look until the process ends."""
        cores = os.sched_getaffinity(0)
        before = (busy_seconds(cores), time.process_time(), time.monotonic())
        while True:
            time.sleep(INTERVAL)
            now = (busy_seconds(cores), time.process_time(), time.monotonic())
            busy, own, passed = (after - first for after, first in zip(now, before))
            before = now
            self.decide((busy - own) / passed, len(cores))

    def decide(self, others: float, cores: int) -> None:
        """Hold threads if others use more cores than are left, release them if they do not."""
        lacking = others + self._threads - cores
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
        """True while waiting threads sleep."""
        return self._held is not None


def hold(library: ctypes.CDLL, count: int, released: threading.Event) -> None:
    """Have libgomp manage `count - 1` threads more until the event is set.

    They belong to the calling thread and end with it. They run a function without effect once.
    """
    library.GOMP_parallel(library.omp_get_thread_num, None, count, 0)
    released.wait()


def busy_seconds(cores: set[int], stat: str | None = None) -> float:
    """Return the seconds that these cores have computed since the machine started.

    `stat` is the text of /proc/stat, read by default. Time that a hypervisor took away does not count.
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
