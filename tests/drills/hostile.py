"""Hostile places, made for real: disks of a size, read-only mounts, another user, a clock that lies.

All mounts are in a namespace of this process's own and go with it. Knows nothing of what is run there.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOBODY, STRANGER = 65534, 54321  # of the second no system knows a name
INSIDE = "PLACES_INSIDE"
CLOCK = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, id, now);
    const char *said = getenv("CLOCK_SET_BACK");
    int wall = id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE;
    if (!failed && wall && said && !access(said, F_OK)) now->tv_sec -= 365 * 24 * 3600;
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec, now->tv_usec = found.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
"""


@dataclass(frozen=True)
class Ended:
    """What became of a command."""

    code: int
    out: str
    err: str


def enter_namespace(module: str) -> None:
    """Start this drill again where its mounts are its own. Raises SystemExit where that is not allowed."""
    if os.environ.get(INSIDE):
        return
    if os.geteuid() or shutil.which("unshare") is None:
        raise SystemExit(f"{module}: skipped: it needs root and unshare, to mount and to be another user")
    os.environ[INSIDE] = "1"
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", module, *sys.argv[1:]]
    os.execvp(command[0], command)


def environment(home: Path, **more: str) -> dict[str, str]:
    """Of a user with this home, with nothing of ours but the way to the programs; what is empty is not set."""
    path = f"{sys.base_prefix}/bin:{os.environ['PATH']}"
    found = {"PATH": path, "OMP_NUM_THREADS": "1", "HOME": str(home), **more}
    return {name: value for name, value in found.items() if value not in ("", ".")}


def start(command: Sequence[str], env: Mapping[str, str], *, user: int = 0) -> subprocess.Popen[str]:
    """The command in a session of its own, its output in pipes."""
    return subprocess.Popen(
        [*_as(user), *command],
        cwd=ROOT,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _as(user: int) -> list[str]:
    if not user:
        return []
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]


def ended(process: subprocess.Popen[str], *, limit: float = 900) -> Ended:
    """Wait for its end; one that hangs is killed, which is code -9."""
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    return Ended(process.returncode, out, err)


def killed_when(process: subprocess.Popen[str], there: Callable[[], bool]) -> Ended:
    """Kill -9 all of its session once something is there, or let it end before."""
    while process.poll() is None and not there():
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    return ended(process)


@contextmanager
def disk(place: Path, size: int) -> Iterator[None]:
    """A disk of so many bytes at a place; at 0 it is full."""
    place.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={max(size, 4096)}", "tmpfs", str(place))
    if not size:
        (place / "ballast").write_bytes(bytes(4096))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def enlarge(place: Path, size: int) -> None:
    """Make room on a disk."""
    _mount("-o", f"remount,size={size}", str(place))
    (place / "ballast").unlink(missing_ok=True)


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    """A place that no one can write to."""
    _mount("--bind", str(place), str(place))
    _mount("-o", "remount,ro,bind", str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def open_interpreter() -> None:
    """Let other users reach the Python that runs this, where it lies in a home that is closed to them."""
    base, aside = Path(sys.base_prefix), Path("/mnt")
    closed = next((one for one in reversed(base.parents) if not one.stat().st_mode & 0o001), None)
    if closed is None:
        return
    _mount("--bind", str(closed), str(aside))
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(closed))
    for path in aside.iterdir():
        place = closed / path.name
        if path.is_dir():
            place.mkdir()
        else:
            place.touch()
        _mount("--bind", str(path), str(place))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def clock(folder: Path) -> tuple[Path, dict[str, str]] | None:
    """A file, and the settings of an environment whose wall clock is a year back as soon as that file is there;
    None where no C compiler is installed. As with a real clock, what counts seconds since the start goes on:
    faketime cannot do that, whose sleeps then fail.
    """
    compiler, source, library = shutil.which("cc"), folder / "clock.c", folder / "clock.so"
    if compiler is None:
        return None
    if not library.exists():
        source.write_text(CLOCK)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    said = folder / "set-back"
    return said, {"LD_PRELOAD": str(library), "CLOCK_SET_BACK": str(said)}
