"""What is asked of the guard, and what it answers: the two sides' common words, as JSON between them.

Named tuples, because importing dataclasses would double the time in which a guard starts.
"""

import json
from typing import NamedTuple

BOX = "/box"  # the working directory of a program
PLAYERS = "/players"  # what of ours is to be seen in the room
NOBODY = 65534


class Limits(NamedTuple):
    """What a program may use, all its processes together but for file and address space."""

    wall_seconds: float
    cpu_seconds: float
    memory_bytes: int
    processes: int
    file_bytes: int
    folder_bytes: int
    output_bytes: int


class Step(NamedTuple):
    """One command; `address_space` is False for those that reserve much more than they use."""

    command: list[str]
    environment: dict[str, str]
    address_space: bool = True


class Job(NamedTuple):
    """Commands to run one after the other in one room, as long as each ends well."""

    level: str
    steps: list[Step]
    limits: Limits
    trees: list[str]  # folders to be seen, read-only, where they are
    files: dict[str, str]  # written into the working directory, and removed before the last step if it is
    #                        not the first: a program that was compiled does not find its tests
    players: dict[str, str]  # files of ours, to be read only
    channel: tuple[int, int] | None = None  # descriptors that become 3 (to read) and 4 (to write)
    word: bool = False  # whether what is written to descriptor 5 is wanted
    tool: str = ""  # bubblewrap's program
    cgroup: str = ""  # below which the room gets a memory cgroup; without it the guard counts memory

    def text(self) -> str:
        """As one line."""
        return json.dumps(self) + "\n"

    @staticmethod
    def read(text: str) -> "Job":
        """The job of a line."""
        job = Job(*json.loads(text))
        return job._replace(steps=[Step(*step) for step in job.steps], limits=Limits(*job.limits))


class Report(NamedTuple):
    """How it ended. `ended` is "exited" with `code`, "killed" by the signal `code`, "stopped" by us, or what
    it had too much of, in words for the user.
    """

    ended: str
    code: int = 0
    step: int = 0  # the last that was begun
    output: str = ""  # of all steps, stdout and stderr as they came
    word: str = ""
    seconds: float = 0.0  # from the first step's start
    trouble: str = ""  # why the room could not be built: then nothing has run

    def text(self) -> str:
        """As one line."""
        return json.dumps(self) + "\n"

    @staticmethod
    def read(text: str) -> "Report":
        """The report of a line."""
        return Report(*json.loads(text))
