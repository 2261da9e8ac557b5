"""Stopping before the end: a signal is remembered, the step ends, and all ranks agree.

SIGTERM is what a scheduler sends, SIGUSR1 what Slurm sends ahead of a time limit (--signal),
SIGINT is Ctrl-C.
"""

import os
import signal
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

EXIT_STOPPED = 75
"""The exit code of a run that a signal stopped and that goes on when it is started again.

EX_TEMPFAIL of sysexits.h: "the user is invited to retry".
"""

EXIT_FILE = "TRAIN_EXIT_FILE"
"""The environment's name of a file that is to hold the exit code: torchrun has one of its own."""


class Stopped(Exception):
    """The run was stopped by a signal and has saved what it did."""


class StopSignals:
    """Remembers SIGTERM, SIGUSR1 and SIGINT from its making on."""

    def __init__(self) -> None:
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank was asked to stop. Called by every rank."""
        asked = torch.tensor(float(self._asked), device=device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked)


def leave_exit_code(code: object) -> None:
    """Write the exit code where the launcher asked for it."""
    path = os.environ.get(EXIT_FILE)
    if path and os.environ.get("LOCAL_RANK", "0") == "0":
        Path(path).write_text(f"{code}\n", encoding="utf-8")
