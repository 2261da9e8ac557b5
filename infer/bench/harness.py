"""Work in records: divided over the processes of torchrun, each record on disk as soon as it is there.

    workers = init_workers()
    with result_folder(out, facts, workers) as partial:      all see one folder, which rank 0 made
        records = Records(partial / "records", names)
        missing = records.open(workers)                      this rank's share
        records.make(missing, workers, "speed", measure)     all records are there
        if workers.first: ...                                one process makes the result of them

Every process has whole models of its own. A run that was killed, or lost a rank, goes on with the records that
are missing, on any number of ranks. Knows nothing of the work.
"""

import atexit
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.progress import Progress

from conf import RankLocalError, UserError
from conf.files import (
    Corrupt,
    read_checksummed,
    read_result,
    with_checksum,
    write_json,
)
from conf.stage import begun, commit, partial_of, publish, versions
from infer.models import parallel

T = TypeVar("T")
PATIENCE = timedelta(
    days=7
)  # a rank may wait so long for the slowest; torchrun ends all when one dies


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
        return values[self.rank :: self.world]

    def agreed(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        values = [value]
        if self.world > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def device(self) -> str | None:
        """Return the GPU of this rank; None where there is none."""
        return f"cuda:{self.local}" if torch.cuda.is_available() else None


def init_workers() -> WorkerGroup:
    """Return torchrun's processes, or this one alone; each loads whole models for itself.

    Raises UserError for more processes than GPUs.
    """
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
def result_folder(
    out: str | Path, facts: Mapping[str, Any], workers: WorkerGroup
) -> Iterator[Path]:
    """Yield the folder that becomes `out` when the block ends well on every rank.

    An interrupted run of the same `facts` left its records there. Raises UserError as `begun` does; an error
    of one rank in the block is reported by that rank.
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


class Records:
    """Results by name, a JSON file each, with a checksum: a damaged one is made again."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = names

    def open(self, workers: WorkerGroup) -> list[str]:
        """Return this rank's share of the missing records; for all ranks, before any saves one."""
        missing = [name for name in self._names if not self._is_done(name)]
        workers.wait()
        return list(workers.share(missing))

    def save(self, name: str, value: Any) -> None:
        """Write a record; a reader sees the whole of it or none."""
        write_json(self._file(name), with_checksum(value))

    def read(self) -> dict[str, Any]:
        """Return the records that are there, in the order of the names. Raises UserError for a damaged one."""
        return {
            name: self.load(name) for name in self._names if self._file(name).is_file()
        }

    def make(
        self,
        names: Sequence[str],
        workers: WorkerGroup,
        title: str,
        measure: Callable[[str], Any],
    ) -> None:
        """Save what `measure` returns of each name, under a progress bar; then wait for the other ranks."""
        with Progress(disable=not workers.first) as progress:
            for name in progress.track(names, description=title):
                self.save(name, measure(name))
        workers.wait()

    def load(self, name: str) -> Any:
        """Return one record. Raises UserError for a damaged one."""
        return read_result(self._file(name))

    def _is_done(self, name: str) -> bool:
        try:
            read_checksummed(self._file(name))
        except (Corrupt, FileNotFoundError):
            return False
        return True

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def hardware() -> dict[str, Any]:
    """Return the processor's name, its cores and the threads in use, and the GPU's name where there is one."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def circumstances(config: Any) -> dict[str, Any]:
    """Return date, commit, hardware, versions and settings of a run."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "settings": asdict(config),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [
        line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()
