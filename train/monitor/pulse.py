"""Whether all ranks live: each tells so every few seconds, and ends when another falls silent.

A collective whose other side has died may wait for as long as the process group allows; on GPUs
nothing tells it. Knows ranks; knows no engine.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

INTERVAL = 5.0  # seconds between two signs of life
PATIENCE = 40.0  # seconds of silence after which a rank counts as dead
DONE = "done"


def shared_store() -> dist.Store:
    """A connection of this rank's own to the store that the ranks met at: a run needs one port.

    The process group's own connection would make a thread wait for the main one's reads.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=INTERVAL))


class Pulse:
    """Signs of life of this rank, and a watch over the others', until `finish`."""

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
        self._store, self._rank, self._others = store, rank, [r for r in range(ranks) if r != rank]
        self._interval, self._patience, self._end = interval, patience, end or _end
        self._finished = threading.Event()
        self._tell("0")
        self._thread = threading.Thread(target=self._watch, name="pulse", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Say that this rank ends well, and stop watching."""
        self._finished.set()
        self._thread.join()
        try:
            self._tell(DONE)
        except RuntimeError:
            return  # who keeps the store, rank 0 or its launcher, has ended before

    def _watch(self) -> None:
        heard: dict[int, tuple[str, float]] = {}
        count, answered = 0, time.monotonic()
        slept = answered
        while not self._finished.wait(self._interval):
            count += 1
            if time.monotonic() - slept > 2 * self._interval:  # suspended: so may the others have been
                heard, answered = {}, time.monotonic()
            try:
                self._tell(str(count))
                for rank in self._others:
                    beat = self._store.get(f"pulse/{rank}").decode()
                    if beat == DONE or heard.get(rank, ("", 0.0))[0] != beat:
                        heard[rank] = beat, time.monotonic()
                answered = time.monotonic()
            except RuntimeError:
                heard[0] = "", answered
            silent = [r for r, (_, at) in heard.items() if time.monotonic() - at > self._patience]
            if silent and not self._finished.is_set():
                names = ", ".join(map(str, silent))
                self._end(
                    f"rank {self._rank}: nothing heard of rank {names} for {self._patience:.0f} s: ending; "
                    "start it again to go on from the last checkpoint"
                )
                return
            slept = time.monotonic()

    def _tell(self, beat: str) -> None:
        self._store.set(f"pulse/{self._rank}", beat)


def _end(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    os._exit(1)  # the main thread may be waiting for the dead
