"""Stopping before the end: a signal is remembered, the step ends, and all ranks agree.

SIGTERM is what a scheduler sends, SIGUSR1 what Slurm sends ahead of a time limit (--signal),
SIGINT is Ctrl-C, SIGHUP a terminal that was closed, unless the run was started to outlive it (nohup).
"""

import signal
from types import FrameType

import torch
import torch.distributed as dist


class StopSignals:
    """Remembers SIGTERM, SIGUSR1, SIGINT and SIGHUP from its making on."""

    def __init__(self) -> None:
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._remember)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank was asked to stop. Called by every rank."""
        asked = torch.tensor(float(self._asked), device=device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked)
