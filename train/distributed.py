"""What the ranks of a run share: values, signals to stop, and signs of life."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

INTERVAL = 5.0  # seconds between two beats
PATIENCE = 40.0  # seconds of silence after which a rank counts as dead
DONE = "done"


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size()


def broadcast(value: Any) -> Any:
    """Return rank 0's value on every rank. Called by every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def gather(value: Any) -> list[Any]:
    """Return all ranks' values, in their order, on every rank. Called by every rank, or before they met."""
    if not dist.is_initialized():
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def is_lost_rank(error: RuntimeError) -> bool:
    """Return whether a collective failed because another rank died."""
    return isinstance(error, dist.DistBackendError) or "gloo" in str(error)


class Abandoned(Exception):
    """A signal ended a step before it had changed weights or optimizer, or a validation; no step may follow."""


class StopSignals:
    """Remembers signals to stop: the step ends, and all ranks agree to stop.

    SIGTERM is what a scheduler sends, SIGUSR1 what Slurm sends ahead of a time limit (--signal), SIGINT is
    Ctrl-C, SIGHUP a closed terminal, unless the run was started to outlive it (nohup).
    """

    def __init__(self) -> None:
        self._stop = False
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._remember)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._stop = True

    def agreed(self, device: torch.device) -> bool:
        """Return whether any rank received a signal. Called by every rank."""
        stop = torch.tensor(float(self._stop), device=device)
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        return bool(stop)


def shared_store() -> dist.Store:
    """Connect to the store at which the ranks met: a run needs one port.

    The process group's own connection would make a thread wait for the main one's reads.
    """
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(
        host, port, is_master=False, timeout=timedelta(seconds=INTERVAL)
    )


class Pulse:
    """Beats of this rank, and a watch over the others', until `finish`; ends the process when one falls silent.

    A collective whose other side has died waits for the process group's timeout, and torchrun, whose SIGTERM
    means "save", for its --shutdown-timeout: many GPUs would idle for ten minutes or more.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        ranks: int,
        interval: float = INTERVAL,
        patience: float = PATIENCE,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._others = [r for r in range(ranks) if r != rank]
        self._interval = interval
        self._patience = patience
        self._end = end or _end
        self._finished = threading.Event()
        self._beat("0")
        self._thread = threading.Thread(target=self._watch, name="pulse", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Tell the others that this rank ends well, and stop watching."""
        self._finished.set()
        self._thread.join()
        try:
            self._beat(DONE)
        except RuntimeError:
            return  # the store's owner, rank 0 or its launcher, has ended before

    def _watch(self) -> None:
        heard: dict[
            int, tuple[str, float]
        ] = {}  # of each rank: its last beat, and when it was first seen
        count = 0
        last = time.monotonic()
        answered = last  # when the store last did
        while not self._finished.wait(self._interval):
            count += 1
            if (
                time.monotonic() - last > 2 * self._interval
            ):  # suspended, and the others perhaps too
                heard = {}
                answered = time.monotonic()
            try:
                self._beat(str(count))
                for rank in self._others:
                    beat = self._store.get(f"pulse/{rank}").decode()
                    if beat == DONE or heard.get(rank, ("", 0.0))[0] != beat:
                        heard[rank] = beat, time.monotonic()
                answered = time.monotonic()
            except RuntimeError:
                heard[0] = "", answered
            silent = [
                r
                for r, (_, at) in heard.items()
                if time.monotonic() - at > self._patience
            ]
            if silent and not self._finished.is_set():
                self._end(
                    f"rank {self._rank}: no sign of life from rank {', '.join(map(str, silent))} for "
                    f"{self._patience:.0f} s. Start the run again to continue from the last checkpoint"
                )
                return
            last = time.monotonic()

    def _beat(self, beat: str) -> None:
        self._store.set(f"pulse/{self._rank}", beat)


def _end(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    os._exit(1)  # the main thread may be waiting for the dead rank
