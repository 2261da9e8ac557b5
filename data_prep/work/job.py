"""One data preparation as its tasks see it: the settings, the folder they write into, the tools.

The plan is made once, before any task runs; a task on another machine finds everything it
needs in the folder.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from conf.files import write_json
from data_prep.config import DataPrepConfig
from data_prep.document import Document, Drop
from data_prep.encode.encoder import Encoder
from data_prep.select.decontaminate import Index
from data_prep.select.screen import screen
from data_prep.sources import Part, read
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
        """Where results of tasks lie that are not part of the result."""
        return self.folder / WORK

    @property
    def is_planned(self) -> bool:
        """Whether the plan, and so all the tools, are in the folder."""
        return (self.folder / PLAN).is_file()

    @cached_property
    def plan(self) -> dict[str, Any]:
        """What was written by `write_plan`."""
        return json.loads((self.folder / PLAN).read_text(encoding="utf-8", errors="surrogateescape"))

    def write_plan(
        self,
        parts: list[Part],
        place: str,
        vocab: Vocab,
        shares: dict[str, float] | None,
        held_out: float,
    ) -> None:
        """Make the plan, the sign that all the tools are in the folder.

        `shares` are the sizes of the languages in the user's table, where there is one; `held_out` is the share
        of documents that are kept out of training.
        """
        plan = {
            "place": place,
            "parts": [asdict(part) for part in parts],
            "vocab": vocab.to_json(),
            "shares": shares,
            "held_out": held_out,
        }
        write_json(self.folder / PLAN, plan)

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of the input."""
        return [Part(tuple(part["files"]), part["size"]) for part in self.plan["parts"]]

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
        """Every row of a part as it is read."""
        return read(self.parts[part], self.plan["place"], self.config.data)

    def screened(self, rows: Iterable[Document | Drop]) -> Iterator[Document | Drop]:
        """The rows, filtered and decontaminated."""
        return screen(rows, self.config.filters, self.encoder, self.index)

    def done(self, phase: str, task: int = 0) -> Path:
        """The folder of a finished task; there is none before."""
        return self.work / phase / f"{task:05d}"

    def read_facts(self, phase: str, task: int = 0) -> dict[str, Any]:
        """The facts of a finished task."""
        return json.loads((self.done(phase, task) / FACTS).read_text(encoding="utf-8"))


def documents_of(rows: Iterable[Document | Drop], drops: Counter[str] | None = None) -> Iterator[Document]:
    """The documents among the rows; the others are counted by reason."""
    for row in rows:
        if isinstance(row, Document):
            yield row
        elif drops is not None:
            drops[row.reason] += 1
