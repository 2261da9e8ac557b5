"""A data preparation as its tasks see it: the settings, the folder, the tools.

The plan is made before any task runs; a task on another machine finds all that it needs
in the folder. Each task writes into a folder of its own, its facts last, and then renames
it to the task's name: a task whose folder exists is finished and never runs again, and
two copies of a task do no harm.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from conf import UserError
from conf.files import write_json
from conf.stage import lock
from data_prep.chat import ChatTemplate
from data_prep.config import DataPrepConfig
from data_prep.document import Document, Drop
from data_prep.encode import Encoder
from data_prep.filters import Index, screen
from data_prep.listing import InputPart
from data_prep.sources import read
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer

WORK = "work"  # below the folder; gone when it is finished
INDEX = "decontamination.json"
PLAN = f"{WORK}/plan.json"
FACTS = "facts.json"


@dataclass
class Job:
    """The settings, the folder, and the tools, which are loaded on first use."""

    config: DataPrepConfig
    folder: Path

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "folder": self.folder}

    @property
    def work(self) -> Path:
        """The folder of the tasks' folders, which is removed in the end."""
        return self.folder / WORK

    @cached_property
    def plan(self) -> dict[str, Any]:
        """`place` of the input, `parts`, `vocab`, `shares` of the table, `held_out`."""
        plan: dict[str, Any] = json.loads((self.folder / PLAN).read_bytes())
        return plan

    @cached_property
    def parts(self) -> list[InputPart]:
        """The parts of the input."""
        return [
            InputPart(tuple(part["files"]), part["size"], tuple(part["odd"]))
            for part in self.plan["parts"]
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
    def chat(self) -> ChatTemplate:
        """The tokenizer's chat template."""
        return ChatTemplate(self.folder / TOKENIZER, self.encoder)

    @cached_property
    def index(self) -> Index:
        """The index of the benchmarks' words."""
        return Index(json.loads((self.folder / INDEX).read_bytes()))

    def rows(self, part: int) -> Iterator[Document | Drop]:
        """Yield every row of a part, unfiltered."""
        return read(self.parts[part], self.plan["place"], self.config.data)

    def screened(self, rows: Iterable[Document | Drop]) -> Iterator[Document | Drop]:
        """Yield the rows, filtered and decontaminated; conversations also encoded."""
        rows = screen(rows, self.config.filters, self.index)
        return map(self.chat.encode, rows) if self.config.data.messages else rows

    def done(self, phase: str, task: int = 0) -> Path:
        """Return the folder of a task, which exists once it is finished."""
        return self.work / phase / f"{task:05d}"

    def read_facts(self, phase: str, task: int = 0) -> dict[str, Any]:
        """Return the facts of a finished task."""
        facts: dict[str, Any] = json.loads(
            (self.done(phase, task) / FACTS).read_bytes()
        )
        return facts


@dataclass(frozen=True)
class Phase:
    """A step of the pipeline: it begins when all tasks of the step before have ended."""

    name: str
    tasks: Callable[[Job], int]
    run: Callable[[Job, int, Path], dict[str, Any]]  # job, task, folder -> facts
    needed: Callable[[Job], bool] = lambda job: True

    def open_tasks(self, job: Job) -> list[int]:
        """Return the tasks that are to run: none of a phase that is not needed."""
        count = self.tasks(job) if self.needed(job) else 0
        return [task for task in range(count) if not job.done(self.name, task).is_dir()]

    def run_task(self, job: Job, task: int) -> None:
        """Run a task, unless it is finished."""
        done = job.done(self.name, task)
        if done.is_dir():
            return
        attempt = done.with_name(f".{done.name}.{uuid4().hex}")
        attempt.mkdir(parents=True)
        descriptor = lock(attempt, attempt)
        try:
            write_json(attempt / FACTS, self.run(job, task, attempt))
            attempt.rename(done)
        except OSError:
            if not done.is_dir():
                raise
            shutil.rmtree(attempt)  # another copy of the task was faster
        finally:
            os.close(descriptor)


def sweep(job: Job) -> None:
    """Remove the folders of killed tasks: every restart would leave as many again."""
    for attempt in job.work.glob("*/.*"):
        # A worker that has not yet noticed that its run was killed holds its lock.
        with suppress(UserError):
            descriptor = lock(attempt, attempt)
            shutil.rmtree(attempt)
            os.close(descriptor)


def one_task(job: Job) -> int:
    """Return 1: the number of tasks of a phase that is not divided."""
    return 1
