"""Write what a run shows its users: the log, the held-out texts, the tracker's rows, the page."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from heapq import merge
from operator import itemgetter
from pathlib import Path
from typing import Any

from train.config import LOG, TEXTS, TrainConfig
from train.metrics import (
    Show,
    StepLog,
    Tracker,
    describe_step,
    describe_validation,
)
from train.texts import ReplayedText, append_texts, read_texts, table

TEXTS_TABLE = "validation/texts"
# Minimum time between two versions of the page in seconds; its plots take one second.
PAGE_SECONDS = 60


@dataclass(frozen=True)
class RunFacts:
    """What a run's page says of model, data and machine."""

    #: the base model by pretrained.base_model
    base: Mapping[str, str]
    #: number of the model's parameters
    parameters: int
    #: summary of the data by data.trained_on
    trained_on: Mapping[str, Any]
    #: name of the device
    device: str
    #: number of ranks
    ranks: int


class Journal:
    """Log, held-out texts, tracker and page of a run.

    Only rank 0 has `writes=True`; on other ranks the methods do nothing. `step` is the last
    step of the checkpoint that the run continues, 0 at the start. `validation` is the
    trainer's list of validations, with their steps; the trainer appends to it.
    """

    def __init__(
        self,
        config: TrainConfig,
        facts: RunFacts,
        validation: Sequence[Mapping[str, float]],
        *,
        seq_len: int,
        step: int,
        writes: bool,
    ) -> None:
        self._config = config
        self._facts = facts
        self._validation = validation
        self._seq_len = seq_len
        self._tokens = config.global_batch * seq_len  # of a step
        self._out = Path(config.out)
        self._log = StepLog(self._out / LOG, step=step) if writes else None
        self._page_time = time.monotonic()
        self._tracker = Tracker(
            config.tracker,
            out=self._out,
            name=f"{self._out.name}-{config.objective.name}",
            settings=asdict(config),
            speaks=writes,
        )
        self._tracker.define_axis("tokens_seen")
        if self._log:
            texts = dict(read_texts(self._out / TEXTS))
            self._tracker.restore(
                tracked_rows(
                    validation, self._log, texts, until=step, tokens=self._tokens
                )
            )
        self.alarm = self._tracker.alarm

    def progress(self, step: int, planned: int | None) -> AbstractContextManager[Show]:
        """Return a context with a function that shows the progress of the steps."""
        name = self._config.objective.name
        return self._tracker.progress(name, done=step, total=planned)

    def add_step(self, step: int, metrics: Mapping[str, float]) -> str:
        """Log the metrics of a step; return them as a line for the progress bar."""
        self._track("train", step, metrics)
        if self._log:
            self._log.append(step, metrics)
        return describe_step(metrics, self._validation)

    def add_validation(
        self,
        metrics: Mapping[str, float],
        texts: Sequence[ReplayedText],
        *,
        planned: int | None,
    ) -> None:
        """Log the metrics of the last validation and its texts; print a line.

        `planned` is the number of steps, None until minutes= has planned it.
        """
        step = int(self._validation[-1]["step"])
        self._track("validation", step, metrics)
        if self._log and texts:
            append_texts(self._out / TEXTS, step, texts)
            self._tracker.log(step, {TEXTS_TABLE: table(texts)})
        line = describe_validation(self._validation)
        self._tracker.tell(f"step {step} held-out: {line}")
        # Not before minutes= has planned the steps: plots take time that the plan would count.
        if planned and time.monotonic() - self._page_time > PAGE_SECONDS:
            self.write_page(step, planned)

    def write_page(self, step: int, planned: int | None) -> None:
        """Write the page of the run up to a step, unless it has no validation yet."""
        if not self._log or not self._validation:
            return
        # Imported late: matplotlib takes a second to load, and only rank 0 needs it.
        from conf.pages import short_path
        from train.page import Run, data_facts, machine_facts, model_facts, write_page

        facts = self._facts
        run = Run(
            name=short_path(self._out),
            config=self._config,
            steps=[{"step": at, **metrics} for at, metrics in self._log.rows(step)],
            validation=self._validation,
            seq_len=self._seq_len,
            planned=planned,
            model=model_facts(
                facts.base, parameters=facts.parameters, dtype=self._config.dtype
            ),
            data=data_facts(facts.trained_on),
            machine=machine_facts(facts.device, ranks=facts.ranks),
        )
        write_page(self._out, run)
        self._page_time = time.monotonic()

    def finish(self) -> None:
        """Finish the tracker's run."""
        self._tracker.finish()

    def _track(self, prefix: str, step: int, metrics: Mapping[str, float]) -> None:
        self._tracker.log(step, named(prefix, step * self._tokens, metrics))


def named(
    prefix: str, tokens_seen: int, metrics: Mapping[str, float]
) -> dict[str, float]:
    """Return metrics by the tracker's names, with the tokens of all steps so far."""
    values = {name: value for name, value in metrics.items() if name != "step"}
    return {"tokens_seen": tokens_seen} | {
        f"{prefix}/{name}": value for name, value in values.items()
    }


def tracked_rows(
    validation: Sequence[Mapping[str, float]],
    log: StepLog,
    texts: Mapping[int, Sequence[ReplayedText]],
    *,
    until: int,
    tokens: int,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Return the rows that the tracker has got up to a step, in order, with their steps.

    A step has `tokens` tokens. The tracker's thread reads the rows during the run, so the
    validations are copied: later ones are left out.
    """
    validations = [(int(row["step"]), "validation", row) for row in validation]
    steps = ((step, "train", metrics) for step, metrics in log.rows(until))

    def rows() -> Iterator[tuple[int, dict[str, Any]]]:
        for step, prefix, row in merge(steps, validations, key=itemgetter(0)):
            yield step, named(prefix, step * tokens, row)
            if prefix == "validation" and step in texts:
                yield step, {TEXTS_TABLE: table(texts[step])}

    return rows()
