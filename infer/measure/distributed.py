"""Work in units, divided over the processes of torchrun, each unit kept on disk as soon as it is done.

    workers = distributed.init_workers()
    with distributed.folder(out, made, workers) as partial:        all see one folder, which rank 0 made
        units = UnitStore(partial / "units", names)
        for name in units.open(workers):                    this rank's share of what is left
            units.save(name, work(name))
        workers.wait()                                      all is there
        if workers.first: ...                               one of them makes the result of it

Every process has whole models of its own. A run that was killed, or lost a rank, goes on with the units
that are missing, on any number of ranks. Knows nothing of the work.
"""

import atexit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from conf import RankLocalError, UserError
from conf.console import print_line
from conf.files import Corrupt, load_checksummed, read_checksummed, with_checksum, write_json
from conf.stage import begun, partial_of, publish
from infer.models import parallel

T = TypeVar("T")
HEADER = "header.json"  # what all units of a run share
UNITS = "units"  # the folder of their files
PATIENCE = timedelta(days=7)  # a rank may wait so long for the slowest; torchrun ends all when one dies


@dataclass(frozen=True)
class WorkerGroup:
    """The processes of a run."""

    rank: int
    world: int
    local: int

    @property
    def first(self) -> bool:
        """Whether this is the one that makes folders, prints and reports."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until all are here."""
        if self.world > 1:
            dist.barrier()

    def share(self, values: Sequence[T]) -> Sequence[T]:
        """Return those of all values that are this rank's work."""
        return values[self.rank % self.world :: self.world]

    def gather(self, share: Sequence[T]) -> list[T]:
        """Return what every rank made of its `share`, in the order of all values, on every rank."""
        shares: list[Any] = [list(share)]
        if self.world > 1:
            shares *= self.world
            dist.all_gather_object(shares, list(share))
        values: list[Any] = [None] * sum(map(len, shares))
        for rank, values_of_rank in enumerate(shares):
            values[rank :: self.world] = values_of_rank
        return values

    def device(self) -> str | None:
        """Return the GPU of this rank; None where there is none."""
        return f"cuda:{self.local}" if torch.cuda.is_available() else None


ALONE = WorkerGroup(rank=0, world=1, local=0)


def init_workers() -> WorkerGroup:
    """Return torchrun's processes, or this one alone; each loads whole models for itself."""
    parallel.stand_alone()
    workers = WorkerGroup(*parallel.place())
    if torch.cuda.is_available():
        if workers.local >= torch.cuda.device_count():
            raise UserError(
                f"torchrun needs a GPU for each process, got {torch.cuda.device_count()} on this machine"
            )
        torch.cuda.set_device(workers.local)
    if workers.world > 1 and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=PATIENCE)
        atexit.register(parallel.leave)
    return workers


@contextmanager
def folder(out: str | Path, facts: Mapping[str, Any], workers: WorkerGroup) -> Iterator[Path]:
    """Return the folder that becomes `out` when the block ends well on every rank; a run of the same
    `facts` that was interrupted left its units there.

    Raises UserError as `begun` does. An error of one rank in the block is reported by that rank.
    """
    with rank_local_errors():
        if workers.first:
            with begun(out, facts) as partial:
                workers.wait()
                yield partial
                workers.wait()
                publish(partial)
        else:
            workers.wait()
            yield partial_of(out)
            workers.wait()
    workers.wait()


@contextmanager
def rank_local_errors() -> Iterator[None]:
    """Turn a UserError of a block that not every rank runs into a RankLocalError, which any rank may report."""
    try:
        yield
    except UserError as error:
        raise RankLocalError(str(error), page=error.page) from error


class UnitStore:
    """Results by name, a file each, with a checksum: one that was damaged since is done again."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder, self._names = folder, names

    def open(self, workers: WorkerGroup) -> list[str]:
        """Return the share of this rank in those that are not done; for all ranks, before any saves one."""
        left = [name for name in self._names if not self._is_done(name, workers)]
        workers.wait()
        return list(workers.share(left))

    def save(self, name: str, value: Any) -> None:
        """Keep one; a reader sees the whole of it or none."""
        write_json(self._file(name), with_checksum(value))

    def read(self) -> dict[str, Any]:
        """Read the units that are done, in the order of the names. Raises UserError for a damaged one."""
        files = {name: file for name in self._names if (file := self._file(name)).is_file()}
        return {name: read_unit(file) for name, file in files.items()}

    def _is_done(self, name: str, workers: WorkerGroup) -> bool:
        file = self._file(name)
        if not file.is_file():
            return False
        try:
            read_checksummed(file)
        except Corrupt as error:
            if workers.first:
                print_line(f"{file} {error}: it is done again")
            return False
        return True

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def read_unit(file: Path) -> dict[str, Any]:
    """Read a unit of a run. Raises UserError for a damaged one."""
    return load_checksummed(file, "the run does it again when it is started again")


def read_units(folder: Path) -> dict[str, Any]:
    """Read all units of a run so far, by name."""
    return {file.stem: read_unit(file) for file in sorted(folder.glob("[!.]*.json"))}


def read_header(file: Path) -> dict[str, Any]:
    """Return the header that all units of a run share. Raises UserError for a damaged one."""
    return load_checksummed(file, f"remove {file.parent} to begin anew")
