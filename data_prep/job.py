"""One data preparation as its tasks see it: the settings, the folder they write into, the tools.

The plan is made once, before any task runs; a task on another machine finds everything it needs in the folder.
Each task writes into a folder of its own, its facts last, which then gets the task's name: a task with a folder
is finished and never runs again, and two copies of it do no harm.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from conf import UserError
from conf.files import write_json
from conf.stage import lock
from data_prep.config import DataPrepConfig
from data_prep.document import Document, Drop
from data_prep.encode import Encoder
from data_prep.filters import Index, screen
from data_prep.sources import InputPart, read
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer

WORK = "work"  # below the folder; gone when it is finished
INDEX = "decontamination.json"
PLAN = f"{WORK}/plan.json"
FACTS = "facts.json"


@dataclass
class Job:
    """What a task is given. Its tools are loaded when they are first used."""

    config: DataPrepConfig
    folder: Path

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "folder": self.folder}

    @property
    def work(self) -> Path:
        """The folder of tasks' results that are not part of the result."""
        return self.folder / WORK

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The plan: `place` of the input, `parts`, `vocab`, `shares` of the user's table, share `held_out`."""
        return json.loads(
            (self.folder / PLAN).read_text(encoding="utf-8", errors="surrogateescape")
        )

    @cached_property
    def parts(self) -> list[InputPart]:
        """The parts of the input."""
        return [
            InputPart(tuple(part["files"]), part["size"]) for part in self.plan["parts"]
        ]

    @cached_property
    def vocab(self) -> Vocab:
        """The ids of the control pieces."""
        return Vocab.from_json(self.plan["vocab"])

    @cached_property
    def encoder(self) -> Encoder:
        """The tokenizer."""
        return Encoder(load_tokenizer(self.folder / TOKENIZER), self.vocab)

    @cached_property
    def index(self) -> Index:
        """The benchmarks' words."""
        return Index(**json.loads((self.folder / INDEX).read_text(encoding="utf-8")))

    def rows(self, part: int) -> Iterator[Document | Drop]:
        """Yield every row of a part as it is read."""
        return read(self.parts[part], self.plan["place"], self.config.data)

    def screened(self, rows: Iterable[Document | Drop]) -> Iterator[Document | Drop]:
        """Yield the rows, filtered and decontaminated."""
        return screen(rows, self.config.filters, self.encoder, self.index)

    def done(self, phase: str, task: int = 0) -> Path:
        """Return the folder of a finished task; there is none before."""
        return self.work / phase / f"{task:05d}"

    def read_facts(self, phase: str, task: int = 0) -> dict[str, Any]:
        """Return the facts of a finished task."""
        return json.loads((self.done(phase, task) / FACTS).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Phase:
    """A step that all tasks of the one before must have ended; `run` is given a folder to write into."""

    name: str
    tasks: Callable[[Job], int]
    run: Callable[[Job, int, Path], dict[str, Any]]
    needed: Callable[[Job], bool] = lambda job: True

    def open_tasks(self, job: Job) -> list[int]:
        """Return the tasks that have not been run."""
        return [
            task
            for task in range(self.tasks(job))
            if not job.done(self.name, task).is_dir()
        ]

    def run_task(self, job: Job, task: int) -> None:
        """Run one task, unless it has been run."""
        done = job.done(self.name, task)
        if done.is_dir():
            return
        attempt = done.with_name(f".{done.name}.{uuid4().hex}")
        attempt.mkdir(parents=True)
        descriptor = lock(attempt, attempt)
        try:
            write_json(attempt / FACTS, self.run(job, task, attempt))
            try:
                attempt.rename(done)
            except OSError:
                if not done.is_dir():
                    raise
                shutil.rmtree(attempt)  # another copy of the task was faster
        finally:
            os.close(descriptor)


def sweep(job: Job) -> None:
    """Remove what killed tasks have left: on every restart they would leave as much again."""
    for attempt in job.work.glob("*/.*"):
        try:
            descriptor = lock(attempt, attempt)
        except (
            UserError
        ):  # of a worker that has not yet noticed that its run was killed
            continue
        shutil.rmtree(attempt)
        os.close(descriptor)


def one_task(job: Job) -> int:
    """Return 1."""
    return 1
