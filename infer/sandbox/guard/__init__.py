"""What stands between a program and the machine: a small process of its own for each room.

    watch.py   reads one job, counts what the room uses, ends it and reports
    walls.py   starts the program behind walls, with its limits and the filter of system calls

The guard imports this package as the top-level package `guard`, without the rest of `infer`, which takes
seconds to import: hence relative imports only, the standard library, and named tuples (importing dataclasses
would double the time in which a guard starts).
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

BOX = "/box"  # the working directory of a program, where a level has a file system of its own


class ProgramLimits(NamedTuple):
    """What a program may use, as SandboxConfig says: MiB where not seconds or a number."""

    wall_seconds: float
    cpu_seconds: float
    memory: int
    processes: int
    file: int
    folder: int
    output: float


class RoomJob(NamedTuple):
    """A command to run in a room."""

    level: str
    limits: ProgramLimits
    cgroup: str = ""  # below which the room gets a memory cgroup; without it the guard counts memory
    bubblewrap: str = ""  # bubblewrap's program
    command: Sequence[str] = ()
    environment: Mapping[str, str] = {}
    trees: Sequence[str] = ()  # folders that the command needs beside the system's, visible read-only
    files: Mapping[str, str] = {}  # written into the working directory
    channel: tuple[int, ...] = ()  # descriptors that the command inherits beside 0, 1 and 2
    address_space: bool = True  # False: the command reserves much more memory than it uses

    @staticmethod
    def read(text: str) -> "RoomJob":
        """Return the job of a line of JSON."""
        job = RoomJob(*json.loads(text))
        return job._replace(limits=ProgramLimits(*job.limits))


class Report(NamedTuple):
    """How a room ended: "exited" with `code`, "killed" by the signal `code`, "stopped" by the sandbox, or the
    limit that was exceeded, in words for the user.
    """

    ended: str
    code: int = 0
    output: str = ""  # stdout and stderr as they came
    seconds: float = 0.0  # from the program's start
    trouble: str = ""  # why the room could not be built: then nothing has run
