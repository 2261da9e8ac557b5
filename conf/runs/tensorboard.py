"""TensorBoard as a tracker: write the data of a W&B run as event files to `OUT/tensorboard/`.

Only this module needs the package tensorboard (pip install tensorboard).
"""

import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conf.errors import UserError

FOLDER = "tensorboard"


def check_installed() -> None:
    """Raise UserError unless the package is there."""
    if not find_spec("tensorboard"):
        raise UserError(
            "tracker.mode=tensorboard needs the package tensorboard, got none. "
            "Install it: pip install tensorboard"
        )


class TensorboardRun:
    """A run with the interface that train.metrics and infer.bench use of W&B's runs.

    Earlier event files are removed, because a resumed training logs its earlier steps again.
    """

    step = 0  # the first step that is not logged yet, as in W&B's runs
    id = None

    def __init__(self, folder: Path) -> None:
        check_installed()
        from torch.utils.tensorboard import SummaryWriter

        events = folder / FOLDER
        shutil.rmtree(events, ignore_errors=True)
        self._writer: Any = SummaryWriter(str(events))
        self.summary = self

    def send(self, action: Callable[[Any], object]) -> None:
        """Call `action` with this run, in this thread."""
        action(self)

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """Write numbers as scalars, and tables as text."""
        for name, value in row.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
            elif hasattr(value, "markdown"):
                self._writer.add_text(name, value.markdown(), step)

    def update(self, values: Mapping[str, Any]) -> None:
        """Write a report's figures at step 0."""
        self.log(values, 0)

    def define_metric(self, *_: object, **__: object) -> None:
        """No-op: TensorBoard always plots over the step."""

    def alert(self, title: str, text: str) -> None:
        """Write a warning as text."""
        self._writer.add_text("warnings", f"{title}: {text}")

    def finish(self) -> None:
        """Write pending events and close the file."""
        self._writer.close()
