"""The same room as walls.py builds, made by bubblewrap: for machines that let it, and not us, make namespaces.

The steward runs inside, on the same Python as the guard, and gets its job through a descriptor.
"""

import json
import os
import sys
from collections.abc import Iterator

from . import kernel
from .job import BOX, PLAYERS, Job
from .steward import Place, run_steps
from .walls import DEVICES, ETC, SYSTEM, place_players

OWN = 2  # bubblewrap outside, and the steward
_GUARD = "/guard"
_BEGIN = f"import sys; sys.path.append('{_GUARD}'); from guard.bubblewrap import enter; enter(*sys.argv[1:])"


def command(job: Job, folder: str, pipes: dict[int, int], tell: int, tasks: int) -> list[str]:
    """Return bubblewrap's words, with the steward in it. Raises OSError for root: its programs would be root
    outside.
    """
    if os.getuid() == 0:
        raise OSError("bubblewrap does not make another user of root")
    place_players(job, f"{folder}/players")
    _copy_guard(f"{folder}/guard")
    _write(f"{folder}/job", job.text())
    place = json.dumps([{str(number): found for number, found in pipes.items()}, tell, tasks])
    words = [job.tool, *_walls(job, folder), "--", os.path.realpath(sys.executable), "-I", "-S", "-B"]
    return [*words, "-c", _BEGIN, place]


def _copy_guard(folder: str) -> None:
    """Ours, without the name of the folder that it comes from: a program can read what is mounted."""
    os.mkdir(folder)
    for entry in os.scandir(os.path.dirname(os.path.abspath(__file__))):
        if entry.name.endswith(".py"):
            with open(entry.path, encoding="utf-8") as file:
                _write(f"{folder}/{entry.name}", file.read())


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _walls(job: Job, folder: str) -> Iterator[str]:
    """Bubblewrap's arguments, in the order in which it acts on them."""
    yield from (
        "--unshare-all",
        "--as-pid-1",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--hostname",
        "sandbox",
    )
    trees = {*map(os.path.realpath, (sys.base_prefix, sys.base_exec_prefix)), *job.trees}
    own = sorted(tree for tree in trees if not tree.startswith("/usr/"))
    for path in (*SYSTEM, *(f"/etc/{name}" for name in (*ETC, *_java())), *own):
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        else:
            yield from ("--ro-bind-try", path, path)
    for name in DEVICES:
        yield from ("--dev-bind", f"/dev/{name}", f"/dev/{name}")
    yield from ("--symlink", "/proc/self/fd", "/dev/fd", "--proc", "/proc")
    yield from ("--ro-bind", f"{folder}/players", PLAYERS, "--ro-bind", f"{folder}/job", f"{_GUARD}/job")
    yield from ("--ro-bind", f"{folder}/guard", f"{_GUARD}/guard")
    yield from ("--size", str(job.limits.folder_bytes), "--tmpfs", BOX, "--symlink", BOX, "/tmp")
    yield from ("--remount-ro", "/proc", "--remount-ro", "/", "--chdir", BOX)


def _java() -> list[str]:
    return [name for name in sorted(os.listdir("/etc")) if name.startswith("java")]


def enter(text: str) -> None:
    """Be the steward, inside."""
    pipes, tell, tasks = json.loads(text)
    with open(f"{_GUARD}/job", encoding="utf-8") as file:
        job = Job.read(file.read())
    kernel.clear_command_line()
    kernel.hide()
    kernel.adopt_orphans()
    named = {int(number): found for number, found in pipes.items()}
    run_steps(job, Place(BOX, PLAYERS, named, tell, tasks))
