"""Share values between the ranks of a run, and agree on signals to stop."""

import signal
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

# A collective fails after this time if another rank has died. It is long because
# collectives also wait for a rank that saves to a slow disk.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def broadcast(value: Any) -> Any:
    """Return rank 0's value on every rank. Every rank must call this."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of ranks, on every rank.

    Every rank must call this. Without a process group the list has the caller's value alone.
    """
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_lost_rank(error: RuntimeError) -> bool:
    """Return whether a collective failed because another rank died."""
    return isinstance(error, dist.DistBackendError) or "gloo" in str(error)


class Abandoned(Exception):
    """A signal interrupted a validation, or a step before it changed weights or optimizer."""


class StopSignals:
    """Record signals to stop, so that all ranks stop together.

    Schedulers send SIGTERM; Slurm sends SIGUSR1 before a time limit (--signal); Ctrl-C
    sends SIGINT; a closed terminal sends SIGHUP, which is ignored under nohup.
    """

    def __init__(self) -> None:
        self._stop = False
        numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._earlier = {
            number: signal.signal(number, self._remember) for number in numbers
        }

    def restore(self) -> None:
        """Restore the earlier signal handlers, so that a sweep can be stopped between its jobs."""
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._stop = True

    def agreed(self, device: torch.device) -> bool:
        """Return whether any rank received a signal. Every rank must call this."""
        stop = torch.tensor(float(self._stop), device=device)
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        return bool(stop)
