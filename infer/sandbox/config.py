"""Settings of the sandbox."""

from dataclasses import dataclass, field

from conf.schema import PATH
from infer.sandbox.guard.job import Limits

MIB = 1 << 20
LEAST_MEMORY = 64  # a Python that has started takes a fifth of it


@dataclass
class SandboxConfig:
    """What a program may use, and whether it may run where nothing confines it.

    The limits hold for all processes of a program together, but `file`, which is for each file. MiB where
    not seconds or a number.
    """

    unconfined: bool = False  # run programs even where the machine offers no walls
    wall_seconds: float = 20.0  # seconds on the clock
    cpu_seconds: float = 10.0  # seconds of the CPU
    memory: int = 1024  # MiB of memory, of files too where they lie in memory
    processes: int = 64  # processes at once, threads counted too
    file: int = 64  # MiB of each file
    folder: int = 256  # MiB of all files
    output: float = 1.0  # MiB that it may print
    # the interpreter that Python programs run on; null: ours
    python: str | None = field(default=None, metadata=PATH)

    def __post_init__(self) -> None:
        for name in ("wall_seconds", "cpu_seconds", "processes", "file", "folder", "output"):
            if not getattr(self, name) > 0:
                raise ValueError(f"sandbox.{name}: wanted more than 0, found {getattr(self, name)}")
        if self.memory < LEAST_MEMORY:
            raise ValueError(f"sandbox.memory: wanted at least {LEAST_MEMORY}, found {self.memory}")

    def limits(self) -> Limits:
        """In the guard's units."""
        return Limits(
            wall_seconds=self.wall_seconds,
            cpu_seconds=self.cpu_seconds,
            memory_bytes=self.memory * MIB,
            processes=self.processes,
            file_bytes=self.file * MIB,
            folder_bytes=self.folder * MIB,
            output_bytes=int(self.output * MIB),
        )
