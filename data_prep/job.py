"""A data preparation for its tasks: settings, folder, tokenizer, index of benchmarks.

The plan is written before any task runs, so a task on another machine needs only the folder.
Each task writes its files into a temporary folder, facts.json last, and then renames the
folder to the task's name. A task is finished if its folder exists; it never runs again, and
two processes that run the same task do no harm.
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

from conf.errors import UserError
from conf.runs.files import write_json
from conf.runs.stage import lock
from data_prep.chat import ChatTemplate
from data_prep.config import DataPrepConfig
from data_prep.document import Document, Drop
from data_prep.encode import Encoder
from data_prep.filters import Index, screen
from data_prep.listing import InputPart
from data_prep.sources import read
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer

WORK = "work"  # subfolder for tasks, removed when the preparation is finished
INDEX = "decontamination.json"
PLAN = f"{WORK}/plan.json"
FACTS = "facts.json"


@dataclass
class Job:
    """The settings and the folder. Tokenizer, chat template and index are loaded on first use."""

    config: DataPrepConfig
    folder: Path

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "folder": self.folder}

    @property
    def work(self) -> Path:
        """The folder with the folders of the tasks, removed at the end."""
        return self.folder / WORK

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The plan: `root` of the input, `parts`, `vocab`, `shares` of languages, `held_out` share."""
        plan: dict[str, Any] = json.loads((self.folder / PLAN).read_bytes())
        return plan

    @cached_property
    def parts(self) -> list[InputPart]:
        """The parts into which the input's files are divided, one for each task of reading."""
        return [
            InputPart(tuple(part["files"]), part["size"], tuple(part["special"]))
            for part in self.plan["parts"]
        ]

    @cached_property
    def vocab(self) -> Vocab:
        """The ids of the tokenizer's control and adaptive pieces."""
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
        """The index of the benchmarks' texts, for decontamination."""
        return Index(json.loads((self.folder / INDEX).read_bytes()))

    def rows(self, part: int) -> Iterator[Document | Drop]:
        """Yield all rows of a part, unfiltered."""
        return read(self.parts[part], self.plan["root"], self.config.data)

    def screen(self, rows: Iterable[Document | Drop]) -> Iterator[Document | Drop]:
        """Filter and decontaminate the rows, and encode conversations."""
        rows = screen(rows, self.config.filters, self.index)
        return map(self.chat.encode, rows) if self.config.data.messages else rows

    def done(self, phase: str, task: int = 0) -> Path:
        """Return the folder of a task, which exists if the task is finished."""
        return self.work / phase / f"{task:05d}"

    def read_facts(self, phase: str, task: int = 0) -> dict[str, Any]:
        """Return the facts of a finished task."""
        facts: dict[str, Any] = json.loads(
            (self.done(phase, task) / FACTS).read_bytes()
        )
        return facts


@dataclass(frozen=True)
class Phase:
    """A step of the pipeline. It starts after all tasks of the previous phase have ended."""

    name: str
    tasks: int | Callable[[Job], int]  # number of tasks
    run: Callable[[Job, int, Path], dict[str, Any]]  # job, task, folder -> facts
    needed: Callable[[Job], bool] = lambda job: True

    def task_count(self, job: Job) -> int:
        """Return the number of tasks."""
        return self.tasks if isinstance(self.tasks, int) else self.tasks(job)

    def open_tasks(self, job: Job) -> list[int]:
        """Return the unfinished tasks; [] if the phase is not needed."""
        count = self.task_count(job) if self.needed(job) else 0
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
            shutil.rmtree(attempt)  # another process has finished the same task
        finally:
            os.close(descriptor)


def remove_stale_attempts(job: Job) -> None:
    """Remove the temporary folders of killed tasks, which would accumulate over restarts."""
    for attempt in job.work.glob("*/.*"):
        # A folder is still locked by a worker that has not noticed that its run was killed.
        with suppress(UserError):
            descriptor = lock(attempt, attempt)
            shutil.rmtree(attempt)
            os.close(descriptor)
