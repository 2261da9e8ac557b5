"""Hostile places: disks of a size, read-only mounts, another user, a clock that is set back.

All mounts are in a namespace of this process and end with it.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOBODY, NAMELESS = 65534, 54321  # user ids; the second has no name on any system
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
    const char *file = getenv("CLOCK_SET_BACK");
    int wall = id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE;
    if (!failed && wall && file && !access(file, F_OK)) now->tv_sec -= 365 * 24 * 3600;
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec, now->tv_usec = time.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    if (now) *now = time.tv_sec;
    return time.tv_sec;
}
"""


@dataclass(frozen=True)
class Result:
    code: int
    stdout: str
    stderr: str


def enter_namespace(module: str) -> None:
    """Start this drill again with mounts of its own. Raises SystemExit where that is not allowed."""
    if os.environ.get(INSIDE):
        return
    if os.geteuid() or shutil.which("unshare") is None:
        raise SystemExit(f"{module}: skipped: it needs root and unshare, to mount and to be another user")
    os.environ[INSIDE] = "1"
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", module, *sys.argv[1:]]
    os.execvp(command[0], command)


def start(command: Sequence[str], home: Path, more: Mapping[str, str], user: int = 0) -> subprocess.Popen[str]:
    """Start a command as a user with this home and nothing of our environment; empty variables are unset."""
    path = f"{sys.base_prefix}/bin:{os.environ['PATH']}"
    environment = {"PATH": path, "OMP_NUM_THREADS": "1", "HOME": str(home), **more}
    as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
    return subprocess.Popen(
        [*as_user, *command],
        cwd=ROOT,
        env={name: value for name, value in environment.items() if value},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait(process: subprocess.Popen[str], *, limit: float = 900) -> Result:
    """Wait for the end; kill a command that hangs, which is code -9."""
    try:
        stdout, stderr = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
    return Result(process.returncode, stdout, stderr)


@contextmanager
def disk(place: Path, size: int) -> Iterator[None]:
    place.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={max(size, 4096)}", "tmpfs", str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def resize(place: Path, size: int) -> None:
    _mount("-o", f"remount,size={max(size, 4096)}", str(place))
    ballast = place / "ballast"
    ballast.unlink(missing_ok=True)
    if not size:
        ballast.write_bytes(bytes(4096))


def used(place: Path) -> int:
    system = os.statvfs(place)
    return (system.f_blocks - system.f_bfree) * system.f_frsize


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    _mount("--bind", str(place), str(place))
    _mount("-o", "remount,ro,bind", str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def open_interpreter() -> None:
    """Let other users reach the running Python, where it is in a home that is closed to them."""
    base, aside = Path(sys.base_prefix), Path("/mnt")
    closed = next((path for path in reversed(base.parents) if not path.stat().st_mode & 0o001), None)
    if closed is None:
        return
    _mount("--bind", str(closed), str(aside))
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(closed))
    for path in aside.iterdir():
        place = closed / path.name
        place.mkdir() if path.is_dir() else place.touch()
        _mount("--bind", str(path), str(place))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def clock(folder: Path) -> tuple[Path, dict[str, str]] | None:
    """Return a file, and an environment whose wall clock is a year back as soon as that file exists; None
    without a C compiler. Clocks that count from the start go on, as real ones do, which faketime cannot.
    """
    compiler, source, library = shutil.which("cc"), folder / "clock.c", folder / "clock.so"
    if compiler is None:
        return None
    if not library.exists():
        source.write_text(CLOCK)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    file = folder / "set-back"
    return file, {"LD_PRELOAD": str(library), "CLOCK_SET_BACK": str(file)}
