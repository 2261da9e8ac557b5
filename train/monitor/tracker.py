"""What a run says of itself: Weights & Biases, and the progress line of the console.

Only rank 0 speaks. Knows no training; numbers come in by name.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import wandb
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from conf.console import PlainConsole
from conf.errors import visible
from conf.stage import commit, versions
from conf.tracker import TrackerConfig, keep_within

ONLINE_SECONDS = 30  # for W&B to answer, before the run goes on without it
LINE_SECONDS = 30  # between two lines in a log file, which shows no bar


class Tracker:
    """Logs metrics by step; silent on every rank but the first."""

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
        self._run: Any = None
        self.run_id = run_id  # W&B's, so that a resumed run stays one run
        if speaks and config.mode != "disabled":
            out.mkdir(parents=True, exist_ok=True)
            self._run = self._begin(config, out=out, name=name, settings=settings, run_id=run_id)
            self.run_id = self._run.id

    def _begin(
        self, config: TrackerConfig, *, out: Path, name: str, settings: dict[str, Any], run_id: str | None
    ) -> Any:
        def begin(mode: Any) -> Any:
            return wandb.init(
                project=config.project,
                name=visible(name),
                id=run_id,
                resume="allow" if run_id else None,
                mode=mode,
                dir=str(out),
                config=settings | {"versions": versions(), "commit": commit()},
                settings=wandb.Settings(silent=True, console="off", init_timeout=ONLINE_SECONDS),
            )

        keep_within(out)
        try:
            return begin(config.mode)
        except wandb.errors.Error as error:
            self.tell(f"tracker.mode={config.mode}: {str(error).splitlines()[0]}; the run goes on offline")
            return begin("offline")

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
