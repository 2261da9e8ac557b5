"""What a run says of itself: Weights & Biases, and the progress line of the console.

Only rank 0 speaks. Knows no training; numbers come in by name.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import wandb
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from conf.console import PlainConsole
from conf.stage import commit, versions
from conf.tracker import TrackerConfig, begin_run, run_file

LINE_SECONDS = 30  # between two lines in a log file, which shows no bar


class Tracker:
    """Logs metrics by step; silent on every rank but the first.

    `file` has the run's id, so that a resumed run stays one run; `linked` is that of a run in the same group.
    """

    def __init__(
        self,
        config: TrackerConfig,
        *,
        out: Path,
        name: str,
        settings: dict[str, Any],
        speaks: bool,
        job_type: str = "train",
        file: Path | None = None,
        linked: Path | None = None,
        run_id: str | None = None,
    ) -> None:
        self._console = PlainConsole(quiet=not speaks)
        self._run: Any = None
        self.run_id = run_id  # W&B's, which a checkpoint has as well
        if speaks and config.mode != "disabled":
            out.mkdir(parents=True, exist_ok=True)
            self._run = begin_run(
                config,
                out,
                file=file or run_file(out),
                name=name,
                job_type=job_type,
                settings=settings | {"versions": versions(), "commit": commit()},
                tell=self.tell,
                linked=linked,
                run_id=run_id,
            )
            self.run_id = self._run.id

    def define_axis(self, name: str) -> None:
        """Draw all metrics over this one, which is logged with them."""
        self._send(lambda run: (run.define_metric(name), run.define_metric("*", step_metric=name)))

    def summarise(self, values: Mapping[str, Any]) -> None:
        """Record figures of the whole run."""
        self._send(lambda run: run.summary.update(dict(values)))

    def log_folder(self, folder: Path, name: str) -> None:
        """Record a folder as an artifact of the type model; its files are read where they are."""

        def send(run: Any) -> None:
            artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", name), type="model")
            artifact.add_dir(str(folder), policy="immutable")
            run.log_artifact(artifact)

        self._send(send)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics of a step."""
        self._send(lambda run: run.log(metrics, step=step))

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table of a step."""
        if rows:
            table = partial(wandb.Table, list(columns), [list(row) for row in rows])
            self._send(lambda run: run.log({name: table()}, step=step))

    def tell(self, sentence: str) -> None:
        """A line on the console."""
        self._console.print(sentence, soft_wrap=True)

    def alarm(self, sentence: str) -> None:
        """A warning on the console, and to whoever W&B sends alerts."""
        self.tell(f"warning: {sentence}")
        self._send(lambda run: run.alert(title="adaptive-tokens", text=sentence))

    @contextmanager
    def progress(self, name: str, *, done: int, total: int) -> Iterator[Callable[[int, str], None]]:
        """A function that shows a step and a line beside the bar; in a log file, a line now and then."""
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[line]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        task = bar.add_task(name, total=total, completed=done, line="")
        told = time.monotonic()

        def show(step: int, line: str) -> None:
            nonlocal told
            bar.update(task, completed=step, line=line)
            if not self._console.is_terminal and (time.monotonic() - told > LINE_SECONDS or step == total):
                told = time.monotonic()
                self.tell(f"step {step}/{total} {line}")

        with bar:
            yield show

    def finish(self) -> None:
        """Close the run."""
        self._send(lambda run: run.finish())

    def _send(self, what: Callable[[Any], Any]) -> None:
        """Tell W&B. Its process may be killed before this one, by a signal to all or for want of memory."""
        if self._run is None:
            return
        try:
            what(self._run)
        except (OSError, wandb.errors.Error) as error:
            self._run = None
            self.tell(f"tracker: W&B's process is gone ({error}): the run goes on without it")
