"""Resumable measurements, shared by the processes of torchrun.

    workers = init_workers()
    with result_folder(out, facts, workers) as partial:   # rank 0 creates the folder
        records = Records(partial / "records", names)
        records.make(workers, "speed", measure)           # each rank measures its share
        if workers.first: ...                             # write the result

Each process loads whole models. With tensor_parallel=true all processes share one model: all
ranks measure every record at the same time, and rank 0 saves it. A record is written as soon as
it is measured. A run that was killed continues with the missing records, on any number of ranks.
"""

import atexit
import hashlib
import json
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from conf.console import torchrun_rank
from conf.errors import AllRanksError, RankLocalError, UserError, counted
from conf.runs.files import (
    Corrupt,
    read_checksummed,
    read_result,
    with_checksum,
    write_json,
)
from conf.runs.stage import commit, partial_of, processor, publish, start_run, versions
from infer.api import Model, load
from infer.bench.config import BenchConfig
from infer.bench.progress import progress
from infer.models import parallel
from infer.models.checkpoint import ModelDirectory

T = TypeVar("T")
#: A part of a measurement, as JSON.
Record = dict[str, Any]
BARRIER_TIMEOUT = timedelta(days=7)  # torchrun ends all ranks when one rank dies


@dataclass(frozen=True)
class WorkerGroup:
    """The processes of a run. They share one model if `divided`."""

    rank: int
    world: int
    local: int
    divided: bool = False

    @property
    def first(self) -> bool:
        """True on rank 0, which creates folders, prints and writes the report."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until all ranks have reached this call."""
        if self.world > 1:
            dist.barrier()

    def agreed(self, value: T) -> T:
        """Return rank 0's value on every rank of torchrun."""
        values = [value]
        if self.world > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def device(self) -> str | None:
        """Return the GPU of this rank; None on a CPU and for a divided model."""
        alone = torch.cuda.is_available() and not self.divided
        return f"cuda:{self.local}" if alone else None


def init_workers(*, divided: bool = False) -> WorkerGroup:
    """Return the processes of torchrun, or this process alone; with `divided` they share a model.

    Raises UserError for more processes than GPUs, and for `divided` with a single process.
    """
    if not divided:
        parallel.use_whole_models()
    workers = WorkerGroup(*torchrun_rank(), divided=divided)
    if divided and workers.world == 1:
        raise UserError(
            "tensor_parallel=true must run in at least 2 processes, got 1. Run "
            "torchrun --standalone --nproc_per_node N -m infer.bench ..."
        )
    if torch.cuda.is_available():
        if workers.local >= torch.cuda.device_count():
            raise UserError(
                "torchrun must start at most one process per GPU, got more processes than the "
                f"{counted(torch.cuda.device_count(), 'GPU')} of this machine. Lower --nproc_per_node."
            )
        torch.cuda.set_device(workers.local)
    if workers.world > 1 and not dist.is_initialized():
        # NCCL reduces the outputs of a divided model's layers between GPUs.
        nccl = divided and torch.cuda.is_available()
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        dist.init_process_group(backend, timeout=BARRIER_TIMEOUT)
        atexit.register(parallel.end_process_group)
    return workers


@contextmanager
def result_folder(
    out: str | Path, facts: Mapping[str, Any], workers: WorkerGroup
) -> Iterator[Path]:
    """Yield a folder that becomes `out` when the block ends without an error on any rank.

    The folder has the records of an interrupted run with the same `facts`. Raises UserError as
    `start_run` does, as a RankLocalError: the rank with the error reports it. An AllRanksError
    stays what it is.
    """
    try:
        if workers.first:
            with start_run(out, facts) as partial:
                workers.wait()
                yield partial
                workers.wait()
                publish(partial)
        else:
            workers.wait()
            yield partial_of(out)
            workers.wait()
    except AllRanksError:
        raise
    except UserError as error:
        raise RankLocalError(str(error), page=error.page) from error
    workers.wait()


class Records:
    """Records by name, each a JSON file with a checksum. A damaged record is measured again."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = names

    def open(self, workers: WorkerGroup, *, together: bool = False) -> list[str]:
        """Return the names of this rank's missing records; with `together` of all missing records.

        All ranks must call it before any rank saves a record.
        """
        missing = [name for name in self._names if not self._is_done(name)]
        workers.wait()
        if together:
            return workers.agreed(missing)
        return missing[workers.rank :: workers.world]

    def save(self, name: str, value: Any) -> None:
        """Write a record atomically."""
        write_json(self._file(name), with_checksum(value))

    def read(self) -> dict[str, Any]:
        """Return the existing records in the order of the names.

        Raises UserError for a damaged record.
        """
        return {
            name: self.load(name) for name in self._names if self._file(name).is_file()
        }

    def make(
        self,
        workers: WorkerGroup,
        title: str,
        measure: Callable[[str], Any],
        *,
        together: bool = False,
    ) -> None:
        """Save `measure(name)` for this rank's missing records, then wait for all ranks.

        With `together` all ranks measure each record, and rank 0 saves it.
        """
        missing = self.open(workers, together=together)
        with progress(title, len(missing), silent=not workers.first) as advance:
            for name in missing:
                record = measure(name)
                if workers.first or not together:
                    self.save(name, record)
                advance()
        workers.wait()

    def load(self, name: str) -> Any:
        """Return a record by its name. Raises UserError for a damaged record."""
        return read_result(self._file(name))

    def _is_done(self, name: str) -> bool:
        try:
            read_checksummed(self._file(name))
        except (Corrupt, FileNotFoundError):
            return False
        return True

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"


class Part(ABC):
    """A part of the report (speed, quality, gsd or load), measured in records."""

    title: str  # the title of the progress bar
    tasks: Mapping[str, Any]  # the task of each record, by the record's name

    def __init__(
        self,
        config: BenchConfig,
        directory: ModelDirectory,
        sets: Mapping[str, Sequence[Any]],
    ) -> None:
        self.config = config
        self.directory = directory
        self.sets = sets
        # JSON that identifies the prompts or problems
        self.content: Any = [[p.ids for p in prompts] for prompts in sets.values()]
        self.warnings: list[str] = []
        self.model: Model
        self.base: Model | None = None

    @abstractmethod
    def measure(self, task: Any) -> Any:
        """Run one task of the part and return its record."""

    @abstractmethod
    def result(self, records: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return the rows of the report. Called only on the first rank."""

    def left_out(self) -> str:
        """Return why a part without tasks is left out."""
        return " ".join(self.warnings) or "no benchmark is set."

    def is_complete(self, result: Mapping[str, Any]) -> bool:
        """Return False if a finished part lacks figures that can be measured now."""
        return True

    def load(self, workers: WorkerGroup) -> None:
        """Load the model, its draft model and its base."""
        load_on_device = partial(
            load,
            dtype=self.config.dtype,
            device=workers.device(),
            compile=self.config.compile,
        )
        self.model = load_on_device(self.directory, draft=self.config.draft)
        if self.config.base:
            base = ModelDirectory(self.config.base, setting="base")
            self.base = load_on_device(base)

    def run(self, folder: Path, workers: WorkerGroup) -> Mapping[str, Any]:
        """Measure the records into `folder`, and return them."""
        records = Records(folder / "records", list(self.tasks))
        records.make(
            workers,
            self.title,
            lambda name: self.measure(self.tasks[name]),
            together=workers.divided,
        )
        return records.read()

    def measure_model(self) -> dict[str, Any]:
        """Return figures of the model itself for the report.

        Called after the records, on the first rank, or on all ranks if they share the model.
        """
        return {}


def digest(value: Any) -> str:
    """Return 16 digits of a hash of a JSON value, such as prompts or problems."""
    text = json.dumps(value, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hardware() -> dict[str, Any]:
    """Return the names of the processor and the GPU, and the number of threads."""
    return {
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def command() -> str | None:
    """Return the command that runs in this process, as typed; None if it is not `infer.bench`.

    sys.argv has Hydra's quotes.
    """
    words = sys.orig_argv
    if "-m" not in words:
        return None
    module, *arguments = words[words.index("-m") + 1 :]
    if module != "infer.bench":
        return None
    _, ranks, _ = torchrun_rank()
    torchrun = ["torchrun", "--standalone", "--nproc_per_node", str(ranks)]
    program = torchrun if ranks > 1 else ["python"]
    return shlex.join([*program, "-m", module, *arguments])


def circumstances(config: Any) -> dict[str, Any]:
    """Return the date, command, commit, hardware, versions and settings of a run."""
    return {
        "command": command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "settings": asdict(config),
    }
