"""A room of one's own: the programs' view of the machine, built in new namespaces.

    /            a small memory file system, read-only once built
    /usr /bin …  the system's, read-only, as are the trees of toolchains, where they are on the machine
    /etc         a few files that programs start with
    /dev         null, full, random, urandom; not zero, which gives memory that no process shows
    /proc        of the room's own processes, where the kernel lets us mount it, read-only
    /box /tmp    empty, written to, of limited size

No home, no other process, no network but a loopback that is down.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress

from . import kernel
from .job import BOX, NOBODY, PLAYERS, Job

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "localtime",
    "timezone",
    "mono",
    "R",
    "php",
    "ldc2.conf",
    "racket",
)
DEVICES = ("null", "full", "random", "urandom")
FOLDER_FILES = 16384
_OLD = "/old"
_OCTAL = re.compile(r"\\([0-7]{3})")
_FLAGS = {
    "ro": kernel.RDONLY,
    "nosuid": kernel.NOSUID,
    "nodev": kernel.NODEV,
    "noexec": kernel.NOEXEC,
    "noatime": kernel.NOATIME,
    "nodiratime": kernel.NODIRATIME,
    "relatime": kernel.RELATIME,
}


def part_from_machine() -> None:
    """Leave the machine's namespaces; that of processes binds the children only."""
    names = kernel.NEWIPC | kernel.NEWUTS | kernel.NEWCGROUP
    kernel.unshare(kernel.NEWUSER | kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | names)


def map_users(pid: int) -> None:
    """Say who is who in the new namespace of `pid`: root and nobody, if we are root, which lets programs be
    another user than their steward; else ourselves alone, which is all that the kernel lets a user say.

    Raises OSError where the machine has no such users to give.
    """
    user, group = os.getuid(), os.getgid()
    if user:
        _tell_kernel(f"/proc/{pid}/setgroups", "deny")
    for name, own in (("gid_map", group), ("uid_map", user)):
        known = f"{own} {own} 1\n" if user else f"0 0 1\n{NOBODY} {NOBODY} 1\n"
        _tell_kernel(f"/proc/{pid}/{name}", known)


def _tell_kernel(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def program_user() -> int:
    """The user that programs run as."""
    return os.getuid() or NOBODY


def build(job: Job) -> None:
    """Furnish the room, in namespaces of our own, and leave the machine's files behind.

    Raises OSError where the kernel refuses a part that cannot be left out.
    """
    kernel.mount("none", "/", "none", kernel.REC | kernel.PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.NOSUID | kernel.NODEV, "size=16m,mode=0755")
    os.chdir("/tmp")
    os.mkdir(_OLD[1:])
    kernel.pivot_root(".", _OLD[1:])
    os.chdir("/")
    for path in (*SYSTEM, *(f"/etc/{name}" for name in _etc()), *sorted(job.trees)):
        _show(path)  # a tree before what lies in it, which is then there
    _devices()
    _own_files(job)
    _read_only()
    os.mkdir("/proc")
    with suppress(OSError):  # in a container whose /proc is masked; most programs do without
        flags = kernel.NOSUID | kernel.NODEV | kernel.NOEXEC
        kernel.mount("proc", "/proc", "proc", flags)
        kernel.mount("none", "/proc", "none", kernel.REMOUNT | kernel.BIND | kernel.RDONLY | flags)
    _box(job.limits.folder_bytes)
    kernel.unmount(_OLD)
    os.rmdir(_OLD)
    flags = kernel.REMOUNT | kernel.BIND | kernel.RDONLY | kernel.NOSUID | kernel.NODEV
    kernel.mount("none", "/", "none", flags)
    kernel.set_hostname("sandbox")


def _etc() -> Iterable[str]:
    java = [name for name in os.listdir(f"{_OLD}/etc") if name.startswith("java")]
    return [*ETC, *sorted(java)]


def _show(path: str) -> None:
    """Have a file or folder of the machine in the room, where it is; nothing where it is not."""
    found = _OLD + path
    if not os.path.lexists(found) or os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    if os.path.islink(found):
        os.symlink(os.readlink(found), path)
        return
    if os.path.isdir(found):
        os.mkdir(path)
    else:
        _write(path, "")
    kernel.mount(found, path, "none", kernel.BIND | kernel.REC)


def _devices() -> None:
    os.mkdir("/dev")
    for name in DEVICES:
        _write(f"/dev/{name}", "")
        kernel.mount(f"{_OLD}/dev/{name}", f"/dev/{name}", "none", kernel.BIND)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")


def _own_files(job: Job) -> None:
    user = program_user()
    os.makedirs("/etc", exist_ok=True)
    _write("/etc/passwd", f"user:x:{user}:{user}::{BOX}:/bin/sh\n")
    _write("/etc/group", f"user:x:{user}:\n")
    place_players(job, PLAYERS)


def place_players(job: Job, folder: str) -> None:
    """Write the files of ours that a program needs."""
    os.makedirs(folder, mode=0o755, exist_ok=True)
    for name, text in job.players.items():
        os.makedirs(os.path.dirname(f"{folder}/{name}"), mode=0o755, exist_ok=True)
        _write(f"{folder}/{name}", text)


def _read_only() -> None:
    """Every mount of the machine's that is seen in the room: with the flags it had, which may not be taken
    away, and these.
    """
    with open(f"{_OLD}/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        lines = [line.split() for line in file]
    for fields in lines:
        path = _OCTAL.sub(lambda found: chr(int(found[1], 8)), fields[4])  # spaces and the like
        if path == "/" or path == _OLD or path.startswith(f"{_OLD}/"):
            continue
        flags = kernel.REMOUNT | kernel.BIND | kernel.RDONLY | kernel.NOSUID
        flags |= 0 if path.startswith("/dev/") else kernel.NODEV
        for option in fields[5].split(","):
            flags |= _FLAGS.get(option, 0)
        kernel.mount("none", path, "none", flags)


def _box(size: int) -> None:
    os.mkdir(BOX)
    user = program_user()
    options = f"size={size},nr_inodes={FOLDER_FILES},mode=0700,uid={user},gid={user}"
    kernel.mount("tmpfs", BOX, "tmpfs", kernel.NOSUID | kernel.NODEV, options)
    os.symlink(BOX, "/tmp")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)
    os.chmod(path, 0o644)  # whatever the mask
