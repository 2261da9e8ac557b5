"""Log the metrics of a run to log.jsonl, the console, Weights & Biases or TensorBoard."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from conf.console import PlainConsole, speed
from conf.runs.files import write_bytes
from conf.runs.stage import commit, versions
from conf.runs.tracker import TrackerConfig, log_missing, log_row, start_run

SHOWN_LENGTHS = 8  # number of acceptance lengths in a console line
SHOWN_OFFSETS = 10  # number of accuracies by offset in a console line
LINE_SECONDS = 30  # interval between lines if the output is not a terminal
# Shows progress; called with the step, a line of metrics, and the number of steps or None.
Show = Callable[[int, str, int | None], None]


def comparable(
    validation: Sequence[Mapping[str, float]],
) -> list[Mapping[str, float]]:
    """Return the validations of the same sequences as the last one.

    A run may continue with another validate_sequences. No metric of its earlier validations
    may then be compared with the last one's.
    """
    return [
        row for row in validation if row["sequences"] == validation[-1]["sequences"]
    ]


def first_and_last(
    validation: Sequence[Mapping[str, float]],
) -> list[Mapping[str, float]]:
    """Return the first and the last comparable validation; one if they are the same, as with steps=0."""
    rows = comparable(validation)
    return rows if len(rows) == 1 else [rows[0], rows[-1]]


def since(first: Mapping[str, float]) -> str:
    """Return when the first comparable validation took place, in words."""
    return f"at step {first['step']:.0f}" if first.get("step") else "before"


def describe_step(
    metrics: Mapping[str, float], validation: Sequence[Mapping[str, float]] = ()
) -> str:
    """Return the metrics of a step for its progress bar, short enough for 80 columns.

    The line also has the first and the last held-out acceptance length.
    """
    parts = (
        [f"loss {metrics['standard_loss']:.2f}"] if "standard_loss" in metrics else []
    )
    if "masked_loss" in metrics:
        parts.append(
            f"masked {metrics['masked_loss']:.2f} drafts {metrics['accepted']:.2f}"
        )
    lengths = acceptance_lengths(first_and_last(validation)) if validation else []
    if lengths:
        parts.append("tau " + "→".join(f"{length:.2f}" for length in lengths))
    return " ".join([*parts, speed(metrics["tokens_per_second"])])


def acceptance_lengths(validation: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the mean acceptance lengths of the validations that measured it."""
    return [row["tau_real"] for row in validation if "tau_real" in row]


def describe_validation(validation: Sequence[Mapping[str, float]]) -> str:
    """Return the last validation as one console line.

    It also has the acceptance lengths of the comparable validations before, SHOWN_LENGTHS
    in all.
    """
    metrics = validation[-1]
    parts = [f"loss {metrics['standard_loss']:.3f}"]
    if "masked_loss" in metrics:
        percentages = " ".join(
            f"{100 * metrics[name]:.0f}"
            for offset in range(1, SHOWN_OFFSETS + 1)
            if (name := f"accuracy_{offset}") in metrics
        )
        lengths = acceptance_lengths(comparable(validation))[-SHOWN_LENGTHS:]
        parts += [
            f"masked {metrics['masked_loss']:.3f}",
            "acceptance length " + " ".join(f"{length:.2f}" for length in lengths),
            f"accuracy by offset {percentages} %",
        ]
    return "  ".join(parts)


def describe_change(validation: Sequence[Mapping[str, float]]) -> str:
    """Return the held-out metrics as one sentence: before and after training, or of one validation."""
    rows = first_and_last(validation)
    times = [f" {since(rows[0])}", " after"] if len(rows) == 2 else [""]

    def values(name: str, digits: int) -> str:
        return ", ".join(
            f"{row[name]:.{digits}f}{when}"
            for row, when in zip(rows, times, strict=True)
        )

    sentence = f"held-out standard-token loss {values('standard_loss', 3)}"
    if len(rows) == 2:
        rise = rows[1]["standard_loss"] / rows[0]["standard_loss"] - 1
        sentence += f" ({100 * rise:+.1f} %)"
    if "accepted" in rows[-1]:
        sentence += f"; expected accepted drafts {values('accepted', 2)}"
    return sentence


class StepLog:
    """The log of a run, in a file and in memory, so that a page need not parse the file again.

    Opening it removes damaged lines and lines after `step`.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        self._path = path
        self._rows: list[tuple[int, Mapping[str, Any]]] = []
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            lines = []
            for line in text.splitlines(True):
                row = _row_of(line)
                if row and row[0] <= step:
                    lines.append(line)
                    self._remember(*row)
            write_bytes(path, "".join(lines).encode())

    def rows(self, until: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield each step up to `until` with its metrics."""
        return takewhile(lambda row: row[0] <= until, self._rows)

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of a step; the first step is 1."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._remember(step, metrics)

    def _remember(self, step: int, metrics: Mapping[str, Any]) -> None:
        # One copy of each name instead of one for each step.
        row = {sys.intern(name): value for name, value in metrics.items()}
        self._rows.append((step, row))


def _row_of(line: str) -> tuple[int, dict[str, Any]] | None:
    """Return the step and the metrics of a log line; None if it is damaged, as after a kill."""
    try:
        row = json.loads(line)
        return int(row.pop("step")), row
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


class Tracker:
    """Log metrics by step to the console and W&B.

    Rank 0 has `speaks=True`; on other ranks all methods do nothing.
    """

    def __init__(
        self,
        config: TrackerConfig,
        *,
        out: Path,
        name: str,
        settings: dict[str, Any],
        speaks: bool,
    ) -> None:
        self._console = PlainConsole(quiet=not speaks)
        self._run = None
        if speaks:
            self._run = start_run(
                config,
                out,
                name=name,
                job_type="train",
                settings=settings | {"versions": versions(), "commit": commit()},
                tell=self.tell,
            )

    def define_axis(self, name: str) -> None:
        """Make this metric the x-axis of all metrics in W&B."""
        self._send(lambda run: run.define_metric(name))
        self._send(lambda run: run.define_metric("*", step_metric=name))

    def restore(self, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Log the metrics of earlier steps of a resumed run that W&B does not have."""
        self._send(lambda run: log_missing(run, rows))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics and tables of a step."""
        self._send(lambda run: log_row(run, metrics, step))

    def tell(self, sentence: str) -> None:
        """Print a line on the console."""
        self._console.print(sentence, soft_wrap=True)

    def alarm(self, sentence: str) -> None:
        """Print a warning on the console, and send it as a W&B alert."""
        self.tell(f"warning: {sentence}")
        self._send(lambda run: run.alert(title="adaptive-tokens", text=sentence))

    @contextmanager
    def progress(self, name: str, *, done: int, total: int | None) -> Iterator[Show]:
        """Yield a function that shows a step: in a progress bar, or as a line if not a terminal."""
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=5),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[line]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        task = bar.add_task(name, total=total, completed=done, line="")
        last = time.monotonic()
        shown: int | None = None

        def show(step: int, line: str, total: int | None) -> None:
            nonlocal last, shown
            bar.update(task, completed=step, total=total, line=line)
            # The last step has one line at once; the progress of its validation follows.
            if not self._console.is_terminal and (
                time.monotonic() - last > LINE_SECONDS or step == total != shown
            ):
                last, shown = time.monotonic(), step
                self.tell(f"step {step}/{'?' if total is None else total} {line}")

        with bar:
            yield show

    def finish(self) -> None:
        """Finish the W&B run."""
        if self._run:
            self._run.finish()

    def _send(self, action: Callable[[Any], object]) -> None:
        if self._run:
            self._run.send(action)
