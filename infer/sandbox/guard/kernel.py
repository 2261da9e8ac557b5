"""The kernel's calls that Python 3.11 does not have: namespaces, mounts, and giving up rights.

Linux on x86_64 and aarch64. Every function raises OSError with the kernel's own error.
"""

import ctypes
import errno
import os

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000,
    0x02000000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, NOATIME = 1, 2, 4, 8, 32, 1024
NODIRATIME, BIND, REC, PRIVATE, RELATIME = 2048, 4096, 16384, 1 << 18, 1 << 21
DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_PDEATHSIG, _DUMPABLE, _SECCOMP, _CAPBSET_DROP, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 22, 24, 36, 38
_libc = ctypes.CDLL(None, use_errno=True)


def machine() -> str:
    """The processor's family. Raises OSError where its call numbers are not known here."""
    name = os.uname().machine
    if name not in PIVOT_ROOT:
        raise OSError(f"no system call numbers for {name}")
    return name


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Namespaces of one's own; that of processes is for children only."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Attach a file system."""
    arguments = [text.encode() for text in (source, target, kind)]
    result = _libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None)
    _check(result, f"mount {kind} {source} on {target}")


def unmount(target: str) -> None:
    """Detach a file system and all below it."""
    _check(_libc.umount2(target.encode(), DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root; the old one is then found at `old`."""
    call = ctypes.c_long(PIVOT_ROOT[machine()])
    _check(_libc.syscall(call, new.encode(), old.encode()), "pivot_root")


def set_hostname(name: str) -> None:
    """The name of the machine, in one's own namespace."""
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def _prctl(option: int, value: int, what: str) -> None:
    arguments = (ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    _check(_libc.prctl(option, *arguments), what)


def die_with_parent() -> None:
    """Be killed when the parent ends; whoever gives up rights afterwards has to ask again."""
    _prctl(_PDEATHSIG, 9, "PR_SET_PDEATHSIG")


def hide() -> None:
    """Nobody of the same user may trace this process or read its memory."""
    _prctl(_DUMPABLE, 0, "PR_SET_DUMPABLE")


def clear_command_line() -> None:
    """Empty what /proc shows as the command line of this process and its forks: it names our folder."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)


def be_ended_first() -> None:
    """Let the kernel end this process and its children before all others where no memory is left."""
    with open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
        file.write("1000")


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process."""
    _prctl(_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")


def give_up_capabilities() -> None:
    """No program started from here on has capabilities, whatever its file says."""
    for capability in range(64):
        try:
            _prctl(_CAPBSET_DROP, capability, "PR_CAPBSET_DROP")
        except OSError as error:
            if error.errno == errno.EINVAL and capability:  # past the last that this kernel knows
                return
            raise


def no_new_privileges() -> None:
    """Setuid programs give no rights from here on."""
    _prctl(_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def set_filter(code: bytes) -> None:
    """Have a BPF program of 8-byte instructions judge every system call from here on."""
    program = _Filter(len(code) // 8, code)
    arguments = (ctypes.c_ulong(2), ctypes.byref(program), ctypes.c_ulong(0), ctypes.c_ulong(0))
    _check(_libc.prctl(_SECCOMP, *arguments), "PR_SET_SECCOMP")
