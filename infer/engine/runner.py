"""A model as verbs: prefill or read, forward, commit, drop.

Knows the order in which a cache is filled; knows no drafting and no choosing.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from threading import Lock
from typing import Any

import torch
from transformers import PreTrainedModel

from infer.engine.attention import band
from infer.engine.forward import DynamicForward, Target, agreed_value
from infer.engine.output import ForwardOutput, Request
from infer.engine.sampling import Sampling
from infer.engine.static import StaticForward, fixed_shapes
from infer.trees.tree import Fed, Tree

FINE = 1e-5  # seconds of a clock's tick: a step of the smallest model takes 1e-3
TICK = 1e-6  # seconds of any duration, at least
Clock = Callable[[], float]


class Runner:
    """Up to `batch` sequences of up to `capacity` tokens on one model. `max_rows` bounds the nodes of a tree.

    `static` chooses fixed shapes, on CUDA as graphs: the default there, where control flow depends on no data
    and one process has all of the model. `compile` fuses the kernels first. `beside` is the Target's.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        capacity: int,
        max_rows: int,
        batch: int = 1,
        static: bool | None = None,
        compile: bool = False,
        beside: PreTrainedModel | None = None,
    ) -> None:
        if static is None:
            static = lm.device.type == "cuda" and fixed_shapes(lm)
        room = (StaticForward if static else DynamicForward).room(
            capacity, max_rows, batch
        )
        self.static = static
        self.clock = loop_clock(lm.device)
        self.agreed: Callable[[float], float] = partial(
            agreed_value, beside or lm
        )  # rank 0's, of a clock
        self._batch = batch
        self._capacity = capacity
        self._max_rows = max_rows
        self._target = target = Target(lm, batch=batch, capacity=room, beside=beside)
        self._places = target.places
        self._dynamic = DynamicForward(target)
        fixed = StaticForward(target, batch=batch, compile=compile) if static else None
        self._forward = fixed or self._dynamic

    def fits(self, *, batch: int, capacity: int, max_rows: int) -> bool:
        """Return whether so much finds room, and the weights lie where they did: graphs have addresses."""
        fits = (
            batch <= self._batch
            and capacity <= self._capacity
            and max_rows <= self._max_rows
        )
        return fits and self._target.places == self._places

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, by sequence."""
        return self._target.cache.lengths

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Start over with these tokens in the cache. Raises ValueError when they do not fit."""
        longest = max(map(len, prompts))
        if len(prompts) > self._batch or longest > self._capacity:
            room = f"a cache of {self._batch} x {self._capacity}"
            raise ValueError(
                f"{len(prompts)} prompts of up to {longest} tokens do not fit {room}"
            )
        self._target.cache.clear(len(prompts))
        self.read(prompts)

    @torch.inference_mode()
    def read(self, texts: Sequence[Sequence[int]]) -> None:
        """Read these tokens of each sequence into the cache, which must have room for them."""
        target = self._target
        longest = max(map(len, texts))
        if any(self.lengths) and longest:
            self._dynamic.hidden(
                [
                    Tree.chain(text[0], text[1:]) if text else Tree.chain(0)
                    for text in texts
                ]
            )
        elif longest:
            # Shorter texts are filled up behind their end, where causal attention never looks.
            ids = torch.tensor(
                [[*text, *[0] * (longest - len(text))] for text in texts]
            )
            target.cache.place(longest)
            positions = torch.arange(longest, device=target.device).expand(
                len(texts), -1
            )
            cutting = {
                kind: window
                for kind, window in target.windows.items()
                if window and window < longest
            }
            masks: Any = {
                kind: band(longest, window, target.device)
                for kind, window in cutting.items()
            }
            masks = (
                {kind: masks.get(kind) for kind in target.windows} if cutting else None
            )
            target.hidden(ids.to(target.device), positions, masks)
            band.cache_clear()  # n x n bytes: of a long prompt a GiB, for no one else
        target.cache.commit([range(len(text)) for text in texts])

    @torch.inference_mode()
    def forward(
        self,
        trees: Sequence[Tree],
        requests: Sequence[Request],
        sampling: Sampling,
        fed: Fed = None,
    ) -> ForwardOutput:
        """Compute the trees' rows, which wait in the cache for `commit`.

        A draft model's tree grows: the rows of its first `fed[b]` nodes wait there already, and the output
        has the candidates behind the others (`ForwardOutput.next_candidates`), no picks.
        """
        return self._forward(trees, requests, sampling, fed)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the rows of these nodes of each tree."""
        self._target.cache.commit(paths)

    def drop(self, b: int) -> None:
        """Forget a sequence; the last one takes its place."""
        self._target.cache.drop(b)


class Runners:
    """Lends a runner to one text at a time; `static`, `compile` and `beside` are the runner's."""

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        static: bool | None = None,
        compile: bool = False,
        beside: PreTrainedModel | None = None,
    ) -> None:
        self.static = static
        self._lm = lm
        self._compile = compile
        self._beside = beside
        self._kept: Runner | None = None
        self._lock = Lock()

    def take(self, *, batch: int, capacity: int, max_rows: int) -> Runner:
        """Return a runner that nobody uses and that fits, or a new one."""
        with self._lock:  # or two threads take the same
            runner = self._kept
            self._kept = None
        if runner is not None and runner.fits(
            batch=batch, capacity=capacity, max_rows=max_rows
        ):
            return runner
        del runner  # its memory makes room for the new one's
        return Runner(
            self._lm,
            batch=batch,
            capacity=capacity,
            max_rows=max_rows,
            static=self.static,
            compile=self._compile,
            beside=self._beside,
        )

    def give(self, runner: Runner) -> None:
        """Give back a runner whose text has ended; one without graphs is not worth its memory."""
        if runner.static:
            self._kept = runner


def loop_clock(device: torch.device) -> Clock:
    """Return the clock of steps on a device: a thread's own, where one does all the work."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return (
        fine_clock(time.thread_time, time.perf_counter) if alone else time.perf_counter
    )


def fine_clock(first: Clock, second: Clock) -> Clock:
    """Return the first clock, or the second where the first, as a thread's may, ticks every 10 ms."""
    return first if tick_of(first) <= FINE else second


def duration(began: float, ended: float) -> float:
    """Return the seconds between two readings of a clock, `TICK` at least: one that ticks every 10 ms, as a
    sandbox's may, reads the same twice.
    """
    return max(ended - began, TICK)


@cache  # a clock that ticks seldom would be waited for at every text
def tick_of(clock: Clock) -> float:
    """Return the seconds from one reading of a busy clock to the next other one, the least of three."""
    ticks: list[float] = []
    while len(ticks) < 3:
        began = clock()
        while (now := clock()) == began:
            pass
        ticks.append(now - began)
    return min(ticks)
