"""TensorBoard as a tracker: what W&B's run is told, as event files below `OUT/tensorboard/`.

Needs the package tensorboard (pip install tensorboard), which nothing else here does.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conf.errors import UserError

FOLDER = "tensorboard"


class TensorboardRun:
    """The run that actions of train.metrics and infer.bench are called with.

    Earlier event files are removed: a resumed training logs its earlier steps again.
    """

    step = 0  # of the first row that is not logged yet, as of W&B's runs
    id = None

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "tracker.mode=tensorboard needs the package tensorboard, got none. "
                "Install it: pip install tensorboard"
            ) from error
        events = folder / FOLDER
        shutil.rmtree(events, ignore_errors=True)
        self._writer: Any = SummaryWriter(str(events))
        self.summary = self

    def send(self, action: Callable[[Any], object]) -> None:
        """Call an action with this run."""
        action(self)

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """Write numbers as scalars, and tables as text."""
        for name, value in row.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
            elif hasattr(value, "markdown"):
                self._writer.add_text(name, value.markdown(), step)

    def update(self, values: Mapping[str, Any]) -> None:
        """Write a report's figures."""
        self.log(values, 0)

    def define_metric(self, *_: object, **__: object) -> None:
        """No-op: TensorBoard draws over the step."""

    def alert(self, title: str, text: str) -> None:
        """Write a warning as text."""
        self._writer.add_text("warnings", f"{title}: {text}")

    def finish(self) -> None:
        """Write what is left."""
        self._writer.close()
