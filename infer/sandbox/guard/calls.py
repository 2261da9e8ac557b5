"""System calls that a program under judgement has no use for, refused by a filter in the kernel (seccomp).

They are doors out of what the walls and limits hold: memory that belongs to no process and is not counted
(memfd, System V, shared anonymous mappings, pages kept in pipes), other processes, sockets, new namespaces with
rights of their own, and parts of the kernel that bugs are found in. Everything else is allowed: the walls, not
the filter, are what confines.
"""

import errno
import struct
from typing import NamedTuple

from . import kernel

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {  # call: its number on x86_64, on aarch64
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
}
_CLONE3, _X32 = 435, 0x40000000
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_ALL_BITS = 0xFFFFFFFF


def _low(argument: int) -> int:
    """The place of an argument's low half in what a filter reads."""
    return 16 + 8 * argument


class _Rule(NamedTuple):
    """The answer to a call where every condition (place, mask, value) holds: bits & mask == value."""

    numbers: tuple[int, int]  # on x86_64, on aarch64
    answer: int
    conditions: tuple[tuple[int, int, int], ...] = ()


_PERM, _INVAL, _SUCCESS = _REFUSE | errno.EPERM, _REFUSE | errno.EINVAL, _REFUSE | 0
_MMAP, _PRLIMIT, _FCNTL = (9, 222), (302, 261), (72, 25)
_SHARED_ANONYMOUS, _HUGETLB, _SOL_SOCKET, _SO_SNDBUF = 0x21, 0x40000, 1, 7
_RULES = (  # the first that fits decides
    _Rule((56, 220), _PERM, ((_low(0), kernel.NEWUSER, kernel.NEWUSER),)),  # clone
    # Shared anonymous memory lives on when the process no longer shows it; huge pages never show.
    _Rule(_MMAP, _PERM, ((_low(3), _SHARED_ANONYMOUS, _SHARED_ANONYMOUS),)),
    _Rule(_MMAP, _PERM, ((_low(3), _HUGETLB, _HUGETLB),)),
    # A page in a pipe or socket may keep a huge page alive. Libraries copy where these are refused with EINVAL.
    _Rule((278, 75), _INVAL),  # vmsplice
    _Rule((275, 76), _INVAL),  # splice
    _Rule((276, 77), _INVAL),  # tee
    _Rule((40, 71), _INVAL),  # sendfile
    # The buffers of sockets keep their first size: the guard counts sockets, not bytes.
    _Rule((54, 208), _SUCCESS, ((_low(1), _ALL_BITS, _SOL_SOCKET), (_low(2), _ALL_BITS, _SO_SNDBUF))),
    # Limits of other processes: a limit of 0 seconds kills.
    _Rule(_PRLIMIT, _ALLOW, ((_low(0), _ALL_BITS, 0),)),
    _Rule(_PRLIMIT, _PERM),
)
_SIGNALS = (  # ways to signal, refused where no namespace keeps other processes out of reach
    _Rule((62, 129), _PERM),  # kill
    _Rule((200, 130), _PERM),  # tkill
    _Rule((234, 131), _PERM),  # tgkill
    _Rule((129, 138), _PERM),  # rt_sigqueueinfo
    _Rule((297, 240), _PERM),  # rt_tgsigqueueinfo
    _Rule((424, 424), _PERM),  # pidfd_send_signal
    *(_Rule(_FCNTL, _PERM, ((_low(1), _ALL_BITS, command),)) for command in (8, 10, 15)),  # F_SETOWN, F_SETSIG
)


def filter_code(*, signals: bool) -> bytes:
    """The filter as BPF instructions for this machine; `signals` says whether programs may send any.

    Raises OSError on processors whose call numbers are not known.
    """
    machine = kernel.machine()
    column = ("x86_64", "aarch64").index(machine)
    rules = [*(_Rule(numbers, _PERM) for numbers in _REFUSED.values()), *_RULES, *(() if signals else _SIGNALS)]
    code = [
        (_LOAD, 0, 0, 4),  # the calling convention: the numbers below mean nothing in another
        (_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        # clone3 has its flags in memory, which a filter cannot read: without it libraries use clone.
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
    ]
    for rule in rules:
        code += _block(rule, column)
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in code)


def _block(rule: _Rule, column: int) -> list[tuple[int, int, int, int]]:
    """The instructions of one rule: from the call's number to its answer, or past it with the number again."""
    left = 3 * len(rule.conditions)  # instructions up to the answer
    code = [(_EQUAL, 0, left + 1 + bool(left), rule.numbers[column])]
    for place, mask, value in rule.conditions:
        left -= 3
        code += [(_LOAD, 0, 0, place), (_AND, 0, 0, mask), (_EQUAL, 0, left + 1, value)]
    code.append((_RETURN, 0, 0, rule.answer))
    return [*code, (_LOAD, 0, 0, 0)] if rule.conditions else code
