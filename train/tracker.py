"""What a run says of itself: Weights & Biases, and the progress line of the console.

Only rank 0 speaks. Knows no training; numbers come in by name.
"""

from pathlib import Path
from typing import Any

import wandb
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from conf.tracker import TrackerConfig


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
        self._speaks = speaks
        self._run = None
        if speaks and config.mode != "disabled":
            out.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=config.project,
                name=name,
                id=run_id,
                resume="allow" if run_id else None,
                mode=config.mode,  # type: ignore[arg-type]
                dir=str(out),
                config=settings,
                settings=wandb.Settings(silent=True, console="off"),
            )

    @property
    def run_id(self) -> str | None:
        """W&B's id of the run, so that a resumed run stays one run."""
        return self._run.id if self._run else None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics of a step."""
        if self._run:
            self._run.log(metrics, step=step)

    def progress(self) -> Progress:
        """A progress bar with a field `line` for the latest numbers."""
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[line]}"),
            disable=not self._speaks,
        )

    def finish(self) -> None:
        """Close the run."""
        if self._run:
            self._run.finish()
