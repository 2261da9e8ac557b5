"""Where a program runs, by level: in namespaces of its own, which bubblewrap makes or we do, or on the
machine as it is with limits only.
"""

import json
import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from . import bubblewrap, cgroup, kernel, walls
from .job import NOBODY, PLAYERS, Job
from .steward import Place, run_steps
from .watch import end_all, tasks_of_user

LEVELS = ("bubblewrap", "namespaces", "limits")
_OWN = {"bubblewrap": bubblewrap.OWN, "namespaces": 1, "limits": 1}
BESIDE = 8  # programs, at the most they may grow to, that run as one user at a time


class Room(NamedTuple):
    """What the guard hears and sees of it."""

    output: int  # descriptors: what programs write to stdout and stderr,
    word: int  # to descriptor 5,
    told: int  # and what the steward says
    own: int  # processes in it that are ours
    folder: str | None  # the working directory, where nothing else limits its size
    cgroup: str  # where the kernel limits its memory; empty where the guard counts


@contextmanager
def opened(job: Job) -> Iterator[Room]:
    """A room with the job begun in it. When the block ends no process of it is left, and no file.

    Raises OSError where the machine does not offer the level.
    """
    output, word, told = os.pipe(), os.pipe(), os.pipe()
    silence = os.open(os.devnull, os.O_RDONLY)
    pipes = {0: silence, 1: output[1], 2: output[1]}
    if job.channel:
        pipes |= {3: job.channel[0], 4: job.channel[1]}
    if job.word:
        pipes |= {5: word[1]}
    folder = _folder() if job.level != "namespaces" else None
    group = ""
    try:
        if job.cgroup:
            group = cgroup.create(job.cgroup, job.limits.memory_bytes)
        if folder is None:
            _start_in_namespaces(job, group, pipes, told[1])
        elif job.level == "bubblewrap":
            _start_in_bubblewrap(job, group, folder, pipes, told[1])
        else:
            _start_with_limits(job, group, folder, pipes, told[1])
        for descriptor in {*pipes.values(), word[1], told[1]}:
            os.close(descriptor)
        yield Room(output[0], word[0], told[0], _OWN[job.level], _box(job, folder), group)
    finally:
        end_all()
        if group:
            cgroup.remove(group)
        if folder:
            _remove(folder)


def _child(main: Callable[[], None], tell: int, group: str = "") -> int:
    """A process that does `main` in a cgroup and ends; what goes wrong is told. Its number is returned."""
    pid = os.fork()
    if pid:
        return pid
    try:
        kernel.be_ended_first()
        if group:
            cgroup.enter(group)
        main()
    except BaseException as error:
        os.write(tell, json.dumps({"trouble": str(error)}).encode() + b"\n")
    finally:
        os._exit(0)


def _start_in_namespaces(job: Job, group: str, pipes: dict[int, int], tell: int) -> None:
    """A process leaves the machine's namespaces and makes another, the first of its own: the steward."""
    parted, go = os.pipe(), os.pipe()

    def leave() -> None:
        os.close(go[1])
        walls.part_from_machine()
        os.write(parted[1], b"1")
        if os.read(go[0], 1):
            _child(enter, tell)

    def enter() -> None:
        if not os.read(go[0], 1):
            return
        kernel.die_with_parent()
        if select.select([go[0]], [], [], 0)[0]:  # the guard had died before we asked
            return
        kernel.hide()
        walls.build(job)
        run_steps(job, Place(walls.BOX, PLAYERS, pipes, tell, _tasks(job)))

    first = _child(leave, tell, group)
    os.close(parted[1])
    if os.read(parted[0], 1):
        walls.map_users(first)
        os.write(go[1], b"1")
    os.waitpid(first, 0)  # now its child, the steward, is ours
    os.write(go[1], b"1")


def _tasks(job: Job) -> int:
    """What the kernel must be told so that the program has its number of processes.

    Since 5.14 it counts those of a user in a namespace of users. Otherwise it counts them on the machine: then
    there is room for programs beside this one, whose number the guard alone holds.
    """
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    if job.level != "limits" and (major, minor) >= (5, 14):
        return job.limits.processes + _OWN[job.level]
    return tasks_of_user(walls.program_user()) + BESIDE * job.limits.processes


def _start_in_bubblewrap(job: Job, group: str, folder: str, pipes: dict[int, int], tell: int) -> None:
    words = bubblewrap.command(job, folder, pipes, tell, _tasks(job))

    def become() -> None:
        for descriptor in {*pipes.values(), tell}:
            os.set_inheritable(descriptor, True)
        kernel.die_with_parent()
        for number in (0, 1, 2):  # not the guard's own, which carry the report
            os.dup2(pipes[number], number)
        os.execve(words[0], words, {})

    _child(become, tell, group)


def _start_with_limits(job: Job, group: str, folder: str, pipes: dict[int, int], tell: int) -> None:
    tasks = _tasks(job)
    os.chmod(folder, 0o711)
    box, players = f"{folder}/box", f"{folder}/players"
    os.mkdir(box, 0o700)
    if os.getuid() == 0:
        os.chown(box, NOBODY, NOBODY)
    walls.place_players(job, players)

    def begin() -> None:
        kernel.die_with_parent()
        kernel.hide()
        kernel.adopt_orphans()
        run_steps(job, Place(box, players, pipes, tell, tasks))

    _child(begin, tell, group)


def _folder() -> str:
    import tempfile  # slow, and seldom needed

    return tempfile.mkdtemp(prefix="sandbox-")


def _box(job: Job, folder: str | None) -> str | None:
    return f"{folder}/box" if job.level == "limits" else None


def _remove(folder: str) -> None:
    """A folder with all that is in it, whatever rights its owner took from itself and however deep it is."""
    for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
        os.spawnvpe(os.P_WAIT, command[0], command, {"PATH": os.defpath})
