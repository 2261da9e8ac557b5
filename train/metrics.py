"""Metrics of a run: log.jsonl, the console, Weights & Biases or TensorBoard."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

SHOWN = 8  # acceptance lengths of a console line
OFFSETS = 10  # offsets whose accuracy a console line shows
LINE_SECONDS = 30  # between two lines in a log file, which shows no bar
# Shows a step, a line beside it, and the number of steps, None if not known.
Show = Callable[[int, str, int | None], None]


def baseline(validation: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Return the first validation on as many sequences as the last one."""
    count = validation[-1]["sequences"]
    return next(row for row in validation if row["sequences"] == count)


def describe_step(
    metrics: Mapping[str, float], validation: Sequence[Mapping[str, float]] = ()
) -> str:
    """Describe a step beside its progress bar, within 80 columns: its own figures, and
    the first and the last held-out acceptance length.
    """
    parts = (
        [f"loss {metrics['standard_loss']:.2f}"] if "standard_loss" in metrics else []
    )
    if "masked_loss" in metrics:
        parts.append(
            f"masked {metrics['masked_loss']:.2f} drafts {metrics['accepted']:.2f}"
        )
    lengths = acceptance_lengths(validation)
    if lengths:
        parts.append(
            "tau "
            + "→".join(f"{lengths[i]:.2f}" for i in sorted({0, len(lengths) - 1}))
        )
    return " ".join([*parts, speed(metrics["tokens_per_second"])])


def acceptance_lengths(validation: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the mean acceptance length of each validation that has one."""
    return [row["tau_real"] for row in validation if "tau_real" in row]


def describe_validation(validation: Sequence[Mapping[str, float]]) -> str:
    """Describe the last validation in one console line, with the acceptance lengths of
    the ones before.
    """
    metrics = validation[-1]
    parts = [f"loss {metrics['standard_loss']:.3f}"]
    if "masked_loss" in metrics:
        percentages = " ".join(
            f"{100 * metrics[name]:.0f}"
            for offset in range(1, OFFSETS + 1)
            if (name := f"accuracy_{offset}") in metrics
        )
        lengths = acceptance_lengths(validation)[-SHOWN:]
        parts += [
            f"masked {metrics['masked_loss']:.3f}",
            "acceptance length " + " ".join(f"{length:.2f}" for length in lengths),
            f"accuracy by offset {percentages} %",
        ]
    return "  ".join(parts)


def describe_change(validation: Sequence[Mapping[str, float]]) -> str:
    """Describe the held-out figures before and after training, in one sentence."""
    before = baseline(validation)
    after = validation[-1]
    rise = after["standard_loss"] / before["standard_loss"] - 1
    sentence = (
        f"held-out standard-token loss {before['standard_loss']:.3f} before, "
        f"{after['standard_loss']:.3f} after ({100 * rise:+.1f} %)"
    )
    if "accepted" in after:
        sentence += (
            f"; expected accepted drafts {before['accepted']:.2f} before, "
            f"{after['accepted']:.2f} after"
        )
    return sentence


class StepLog:
    """The log of a run that has taken `step` steps; later and damaged lines are
    removed.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        self._path = path
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines(True) if _step_of(line) <= step]
            write_bytes(path, "".join(lines).encode())

    def rows(self, until: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the steps up to `until` with their metrics."""
        if self._path.is_file():
            with open(self._path, encoding="utf-8") as file:
                for line in file:
                    row = json.loads(line)
                    step = row.pop("step")
                    if step > until:
                        break
                    yield step, row

    def append(self, step: int, metrics: dict[str, Any]) -> None:
        """Add the metrics of a step; steps count from 1."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")


def _step_of(line: str) -> float:
    """Return the step of a line of the log; infinity for a damaged line (after a kill)."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return float("inf")


class Tracker:
    """Logs metrics by step to the console and W&B; silent on every rank but the first.

    A resumed run stays one run: `run_id` is W&B's id of its beginning.
    """

    def __init__(
        self,
        config: TrackerConfig,
        *,
        out: Path,
        name: str,
        settings: dict[str, Any],
        speaks: bool,
        run_id: str | None = None,
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
                run_id=run_id,
            )
        self.run_id = self._run.id if self._run else run_id  # W&B's

    def define_axis(self, name: str) -> None:
        """Draw all metrics over this one, which is logged with them."""
        self._send(lambda run: run.define_metric(name))
        self._send(lambda run: run.define_metric("*", step_metric=name))

    def restore(self, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Record the metrics of earlier steps in a resumed run, where W&B lacks them."""
        self._send(lambda run: log_missing(run, rows))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record metrics and tables of a step."""
        self._send(lambda run: log_row(run, metrics, step))

    def tell(self, sentence: str) -> None:
        """Print a line on the console."""
        self._console.print(sentence, soft_wrap=True)

    def alarm(self, sentence: str) -> None:
        """Warn on the console, and by W&B's alerts."""
        self.tell(f"warning: {sentence}")
        self._send(lambda run: run.alert(title="adaptive-tokens", text=sentence))

    @contextmanager
    def progress(self, name: str, *, done: int, total: int | None) -> Iterator[Show]:
        """Yield a function that shows a step: beside a bar, or as a line of a log file."""
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

        def show(step: int, line: str, total: int | None) -> None:
            nonlocal last
            bar.update(task, completed=step, total=total, line=line)
            if not self._console.is_terminal and (
                time.monotonic() - last > LINE_SECONDS or step == total
            ):
                last = time.monotonic()
                self.tell(f"step {step}/{total or '?'} {line}")

        with bar:
            yield show

    def finish(self) -> None:
        """Close the run."""
        if self._run:
            self._run.finish()

    def _send(self, action: Callable[[Any], object]) -> None:
        if self._run:
            self._run.send(action)
