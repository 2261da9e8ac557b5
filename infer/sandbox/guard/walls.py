"""The levels of confinement: a program started with its limits, behind walls.

    bubblewrap   namespaces made by bubblewrap, for ordinary users: of root it makes no other user
    namespaces   the same made here, for root too, whose programs run as nobody
    limits       the machine as it is, with the limits and the filter of system calls alone

What a program sees in namespaces:

    /            a small memory file system, read-only
    /usr /bin …  the system's, read-only, as are the trees of toolchains
    /etc         a few files that programs start with
    /dev         null, full, random, urandom; not zero, which gives memory that no process shows
    /proc        of the room's own processes, read-only
    /box /tmp    an empty file system in memory, of limited size

It sees no home, no other process, and no network but a loopback that is down.
"""

import ctypes
import errno
import math
import os
import re
import resource
import signal
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from . import BOX, RoomJob

OWN = {"bubblewrap": 2, "namespaces": 2, "limits": 0}  # processes of a room that are not the program's
LEVELS = tuple(OWN)
NOBODY = 65534
FOLDER_FILES = 16384
READY = b"ready\n"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = ["ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "timezone"]
ETC += ["mono", "R", "php", "ldc2.conf", "racket"]
DEVICES = ("null", "full", "random", "urandom")
OPEN_FILES = 256
ADDRESS_SPACE = 2  # times the memory: reserving is not using
_ROOMS_BESIDE = 8  # rooms at their limit of processes that may run as one user at a time
_OLD = "/old"
_OCTAL = re.compile(rb"\\([0-7]{3})")  # a space is \040
# The room's first shell says on descriptor 0 that all is built, and turns into the program.
_START = 'echo ready >&0; exec "$@" </dev/null'

# Numbers of linux/prctl.h, sched.h and mount.h.
_PDEATHSIG, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVS = 1, 22, 36, 38
_NEWUSER = 0x10000000
_NEW_NAMESPACES = _NEWUSER | 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_libc = ctypes.CDLL(None, use_errno=True)


def start(job: RoomJob, folder: str, output: int, ready: int) -> int:
    """Fork the process that becomes the room, and return its id.

    The program writes to `output`. `ready` receives READY once the program runs, otherwise the reason why it
    does not. `folder` is its working directory at the level "limits".
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent()
        _write("/proc/self/oom_score_adj", "1000")  # the first that the kernel ends where no memory is left
        if job.cgroup:
            _write(f"{job.cgroup}/cgroup.procs", "0")
        for number, descriptor in enumerate((ready, output, output)):
            os.dup2(descriptor, number)
        tasks = _tasks(job)
        _set_limits(job)
        {"bubblewrap": _bubblewrap, "namespaces": _namespaces, "limits": _limits}[job.level](job, folder, tasks)
    except BaseException as error:
        os.write(ready, str(error).encode())
    finally:
        os._exit(1)


def _call(function: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError with the kernel's own error."""
    values = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    if getattr(_libc, function)(*values) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def die_with_parent() -> None:
    """Ask to be killed when the parent ends. Changing the user takes it back."""
    _call("prctl", _PDEATHSIG, signal.SIGKILL.value)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends."""
    _call("prctl", _SUBREAPER, 1, 0, 0, 0)


def _set_limits(job: RoomJob) -> None:
    """Set the limits that the kernel holds for each process; the guard counts for all together."""
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        _limit(kind, 0)
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_SIGPENDING):
        _limit(kind, OPEN_FILES)
    _limit(resource.RLIMIT_CPU, math.ceil(job.limits.cpu_seconds) + 1)
    _limit(resource.RLIMIT_FSIZE, job.limits.file << 20)
    if job.address_space:
        _limit(resource.RLIMIT_AS, ADDRESS_SPACE * job.limits.memory << 20)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _tasks(job: RoomJob) -> int:
    """Return the kernel's limit on tasks of the program's user.

    Since Linux 5.14 it counts those in a namespace of users. Otherwise it counts all on the machine: then there
    is room for rooms beside this one, and the guard alone holds the limit.
    """
    version = tuple(map(int, os.uname().release.split(".")[:2]))
    if job.level != "limits" and version >= (5, 14):
        return job.limits.processes + OWN[job.level]
    user, tasks = os.getuid() or NOBODY, 0
    for entry in os.scandir("/proc"):
        with suppress(OSError):  # it has ended
            if entry.name.isdigit() and entry.stat().st_uid == user:
                tasks += len(os.listdir(f"{entry.path}/task"))
    return tasks + _ROOMS_BESIDE * job.limits.processes


def _limits(job: RoomJob, folder: str, tasks: int) -> None:
    if os.getuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    _write_files(job, folder)
    _become_program(job, folder, tasks)


def _become_program(job: RoomJob, folder: str, tasks: int) -> None:
    _limit(resource.RLIMIT_NPROC, tasks)
    os.setsid()
    os.chdir(folder)
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        die_with_parent()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    code = filter_code(signals=job.level != "limits")
    _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _SECCOMP, 2, ctypes.byref(_Filter(len(code) // 8, code)), 0, 0)
    os.execve("/bin/sh", ["sh", "-c", _START, "sh", *job.command], {**job.environment, "HOME": folder})


def _write_files(job: RoomJob, folder: str) -> None:
    for name, text in job.files.items():
        _write(f"{folder}/{name}", text)
        os.chmod(f"{folder}/{name}", 0o644)  # whatever the mask


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


def _system() -> list[str]:
    """Return what a program sees of the system, as far as it exists."""
    java = (name for name in sorted(os.listdir("/etc")) if name.startswith("java"))
    return [path for path in (*SYSTEM, *(f"/etc/{name}" for name in (*ETC, *java))) if os.path.lexists(path)]


def _bubblewrap(job: RoomJob, folder: str, tasks: int) -> None:
    if os.getuid() == 0:
        raise OSError("bubblewrap does not make another user of root")
    program = ["/usr/bin/prlimit", f"--nproc={tasks}", "/bin/sh", "-c", _START, "sh", *job.command]
    arguments = [job.bubblewrap, *_bubblewrap_arguments(job), "--", *program]
    os.execve(job.bubblewrap, arguments, {**job.environment, "HOME": BOX})


def _bubblewrap_arguments(job: RoomJob) -> Iterator[str]:
    """Yield the walls in the order in which bubblewrap builds them."""
    yield from ("--unshare-all", "--die-with-parent", "--new-session", "--hostname", "sandbox")
    for path in (*_system(), *sorted(job.trees)):
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        else:
            yield from ("--ro-bind", path, path)
    for name in DEVICES:
        yield from ("--dev-bind", f"/dev/{name}", f"/dev/{name}")
    yield from ("--symlink", "/proc/self/fd", "/dev/fd", "--proc", "/proc")
    yield from ("--size", str(job.limits.folder << 20), "--tmpfs", BOX, "--symlink", BOX, "/tmp")
    for name, text in job.files.items():
        yield from ("--file", _in_memory(text.encode("utf-8", "surrogatepass")), f"{BOX}/{name}")
    yield from ("--remount-ro", "/proc", "--remount-ro", "/", "--chdir", BOX)
    yield from ("--seccomp", _in_memory(filter_code(signals=True)))


def _in_memory(data: bytes) -> str:
    descriptor = os.memfd_create("data", 0)
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return str(descriptor)


def _namespaces(job: RoomJob, folder: str, tasks: int) -> None:
    """Build the room and be its first process: when that ends, the kernel ends all others."""
    _unshare()
    first = os.fork()
    if first:
        os._exit(wait_for(first))
    die_with_parent()
    _build(job)
    program = os.fork()
    if program == 0:
        _become_program(job, BOX, tasks)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os._exit(wait_for(program))


def wait_for(pid: int) -> int:
    """Return a process's exit code, or 128 and the number of the signal that ended it; orphans are reaped."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return exit_code(status)


def exit_code(status: int) -> int:
    """Return the exit code of a wait status as a shell does."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _unshare() -> None:
    """Leave the machine's namespaces; that of processes binds the children only.

    In the namespace of users are root and nobody, if we are root, which lets programs be another user than the
    room's first process; otherwise this user alone. A process that stayed outside has to say so.
    """
    user, group, pid = os.getuid(), os.getgid(), os.getpid()
    parted, part = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(part)
        if os.read(parted, 1):
            if user:
                _write(f"/proc/{pid}/setgroups", "deny")
            for name, own in (("gid_map", group), ("uid_map", user)):
                _write(f"/proc/{pid}/{name}", f"{own} {own} 1\n" if user else f"0 0 1\n{NOBODY} {NOBODY} 1\n")
        os._exit(0)
    _call("unshare", _NEW_NAMESPACES)
    os.write(part, b"1")
    os.close(part)
    if wait_for(helper):
        raise OSError("the kernel refuses to map users into a namespace")


def _build(job: RoomJob) -> None:
    user = os.getuid() or NOBODY
    system = _system()
    _mount("none", "/", "none", _REC | _PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, "size=16m,mode=0755")
    os.chdir("/tmp")
    os.mkdir(_OLD[1:])
    _call("syscall", _PIVOT_ROOT[os.uname().machine], b".", _OLD[1:].encode())
    os.chdir("/")
    for folder in ("/dev", "/etc", "/proc", BOX):
        os.mkdir(folder)
    for path in (*system, *sorted(job.trees), *(f"/dev/{name}" for name in DEVICES)):
        _show(path)  # a tree before what lies in it
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    os.symlink(BOX, "/tmp")
    _write("/etc/passwd", f"user:x:{user}:{user}::{BOX}:/bin/sh\n")
    _write("/etc/group", f"user:x:{user}:\n")
    _make_read_only()
    with suppress(OSError):  # in a container whose /proc is masked; most programs do without
        _mount("proc", "/proc", "proc", _RDONLY | _NOSUID | _NODEV | _NOEXEC)
    options = f"size={job.limits.folder}m,nr_inodes={FOLDER_FILES},mode=0700,uid={user},gid={user}"
    _mount("tmpfs", BOX, "tmpfs", _NOSUID | _NODEV, options)
    _write_files(job, BOX)
    _call("umount2", _OLD.encode(), _DETACH)
    os.rmdir(_OLD)
    _mount("none", "/", "none", _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    _call("sethostname", b"sandbox", len("sandbox"))


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _call("mount", source.encode(), os.fsencode(target), kind.encode(), flags, data.encode() or None)


def _show(path: str) -> None:
    source = _OLD + path
    if os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.mkdir(path)
    else:
        _write(path, "")
    _mount(source, path, "none", _BIND | _REC)


def _make_read_only() -> None:
    """Set every mount of the machine's that the room shows read-only, beside the flags that it had."""
    with open(f"{_OLD}/proc/self/mountinfo", "rb") as file:
        paths = [_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), line.split()[4]) for line in file]
    for path in paths:
        if path != b"/" and not (path + b"/").startswith(_OLD.encode() + b"/"):
            flags = os.statvfs(path).f_flag & (_RDONLY | _NOSUID | _NODEV | _NOEXEC)
            _mount("none", os.fsdecode(path), "none", flags | _REMOUNT | _BIND | _RDONLY | _NOSUID)


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


# The filter (seccomp) refuses system calls that a program has no use for: memory that belongs to no process and
# is not counted, other processes, sockets, new namespaces with rights of their own, and parts of the kernel
# that bugs are found in. Everything else is allowed: the walls are what confines.
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _KILL, _REFUSE, _X32 = 0x7FFF0000, 0x80000000, 0x00050000, 0x40000000


class _Rule(NamedTuple):
    """The answer to a call where `low half & mask == value` for each (argument, mask, value)."""

    x86_64: int
    aarch64: int
    error: int | None = errno.EPERM  # None: allowed; 0: pretended to be done
    conditions: tuple[tuple[int, int, int], ...] = ()


_ALL = 0xFFFFFFFF
_RULES = (  # the first that fits decides
    _Rule(41, 198),  # socket; socketpair is allowed
    _Rule(101, 117),  # ptrace
    _Rule(310, 270),  # process_vm_readv
    _Rule(311, 271),  # process_vm_writev
    _Rule(438, 438),  # pidfd_getfd
    _Rule(319, 279),  # memfd_create
    _Rule(447, 447),  # memfd_secret
    _Rule(29, 194),  # shmget
    _Rule(64, 190),  # semget
    _Rule(68, 186),  # msgget
    _Rule(248, 217),  # add_key
    _Rule(249, 218),  # request_key
    _Rule(250, 219),  # keyctl
    _Rule(321, 280),  # bpf
    _Rule(298, 241),  # perf_event_open
    _Rule(323, 282),  # userfaultfd
    _Rule(425, 425),  # io_uring_setup
    _Rule(272, 97),  # unshare
    _Rule(56, 220, conditions=((0, _NEWUSER, _NEWUSER),)),  # clone
    _Rule(435, 435, errno.ENOSYS),  # clone3 has its flags in memory, out of sight: libraries then use clone
    # mmap: shared anonymous memory lives on when the process no longer shows it; huge pages never show.
    _Rule(9, 222, conditions=((3, 0x21, 0x21),)),
    _Rule(9, 222, conditions=((3, 0x40000, 0x40000),)),
    # A page in a pipe or socket may keep a huge page alive. Libraries copy where these are refused with EINVAL.
    _Rule(278, 75, errno.EINVAL),  # vmsplice
    _Rule(275, 76, errno.EINVAL),  # splice
    _Rule(276, 77, errno.EINVAL),  # tee
    _Rule(40, 71, errno.EINVAL),  # sendfile
    # setsockopt SOL_SOCKET SO_SNDBUF: the guard counts sockets by the first size of their buffers.
    _Rule(54, 208, 0, ((1, _ALL, 1), (2, _ALL, 7))),
    # prlimit of other processes: a limit of 0 seconds kills.
    _Rule(302, 261, None, ((0, _ALL, 0),)),
    _Rule(302, 261),
)
_SIGNAL_RULES = (  # where no namespace keeps other processes out of reach
    _Rule(62, 129),  # kill
    _Rule(200, 130),  # tkill
    _Rule(234, 131),  # tgkill
    _Rule(129, 138),  # rt_sigqueueinfo
    _Rule(297, 240),  # rt_tgsigqueueinfo
    _Rule(424, 424),  # pidfd_send_signal
    *(_Rule(72, 25, conditions=((1, _ALL, command),)) for command in (8, 10, 15)),  # fcntl F_SETOWN, F_SETSIG
)


def filter_code(*, signals: bool) -> bytes:
    """Return the filter as BPF instructions for this machine; `signals` says whether programs may send any.

    Raises OSError on processors whose call numbers are not known here.
    """
    machine = os.uname().machine
    if machine not in _AUDIT:
        raise OSError(f"no system call numbers for {machine}")
    code = [
        (_LOAD, 0, 0, 4),  # the calling convention: the numbers below mean nothing in another
        (_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for rule in (*_RULES, *(() if signals else _SIGNAL_RULES)):
        left = 3 * len(rule.conditions)  # instructions up to the answer
        code.append((_EQUAL, 0, left + 1 + bool(left), getattr(rule, machine)))
        for argument, mask, value in rule.conditions:
            left -= 3
            code += [(_LOAD, 0, 0, 16 + 8 * argument), (_AND, 0, 0, mask), (_EQUAL, 0, left + 1, value)]
        code.append((_RETURN, 0, 0, _ALLOW if rule.error is None else _REFUSE | rule.error))
        if rule.conditions:
            code.append((_LOAD, 0, 0, 0))
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in code)
