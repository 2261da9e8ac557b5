"""System calls that a program under judgement has no use for, refused by a filter in the kernel (seccomp).

They are doors out of what the walls hold: memory that belongs to no process and is not counted (memfd,
System V), other processes, sockets, new namespaces with rights of their own, and parts of the kernel that
bugs are found in. Everything else is allowed: the walls, not the filter, are what confines.
"""

import errno
import struct

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
_SIGNALS = {  # refused where no namespace keeps other processes out of reach
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
_CLONE, _CLONE3, _X32 = (56, 220), 435, 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


def filter_code(*, signals: bool) -> bytes:
    """The filter as BPF instructions for this machine; `signals` says whether programs may send any.

    Raises OSError on processors whose call numbers are not known.
    """
    machine = kernel.machine()
    column = ("x86_64", "aarch64").index(machine)
    calls = _REFUSED if signals else _REFUSED | _SIGNALS
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
    for numbers in calls.values():
        code += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _REFUSE | errno.EPERM)]
    code += [
        (_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD, 0, 0, 16),  # its flags: the low half of the first argument
        (_ANY_BIT, 0, 1, kernel.NEWUSER),
        (_RETURN, 0, 0, _REFUSE | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in code)
