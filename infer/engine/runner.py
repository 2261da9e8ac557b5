"""Runners: a model with its key-value cache. The operations are prefill, read, forward, commit, drop.

A runner fills the cache in the right order. It contains no drafting and no sampling.
"""

from collections.abc import Sequence
from functools import cache
from logging import getLogger
from threading import Lock

import torch
from transformers import PreTrainedModel

from conf.devices.openmp import watch
from infer.engine.forward import DynamicForward, Target
from infer.engine.output import ForwardOutput, Request
from infer.engine.sampling import Sampling
from infer.engine.static import StaticForward, fixed_shapes
from infer.trees.tree import Fed, Tree

TICK = 1e-6  # the shortest duration in seconds


class Runner:
    """The forwards and the cache of one model, for up to `batch` sequences of `capacity` tokens.

    A tree has up to `max_rows` nodes. `static` pads forwards to fixed shapes, on CUDA as
    graphs. This is the default on CUDA if the model's control flow does not depend on data
    and one process has the whole model. `compile` fuses the kernels with torch.compile.
    `target` is the model that `lm` drafts for.
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
        target: PreTrainedModel | None = None,
    ) -> None:
        if lm.device.type == "cpu":
            watch(torch.get_num_threads())
        if static is None:
            static = lm.device.type == "cuda" and fixed_shapes(lm)
        kind = StaticForward if static else DynamicForward
        rows = kind.cache_rows(capacity, max_rows, batch)
        self.static = static
        self._batch = batch
        self._max_rows = max_rows
        self._target = Target(lm, batch=batch, capacity=rows, target=target)
        self._addresses = self._target.addresses if static else ()
        self._overflowed = False
        self._dynamic = DynamicForward(self._target)
        self._forward: StaticForward | DynamicForward = self._dynamic
        if static:
            self._forward = StaticForward(self._target, batch=batch, compile=compile)

    def fits(self, *, batch: int, capacity: int, max_rows: int) -> bool:
        """Return True if a request of this size fits and no weight has moved.

        CUDA graphs contain the addresses of the weights.
        """
        rows = self._forward.cache_rows(capacity, self._max_rows, self._batch)
        return (
            batch <= self._batch
            and rows <= self._target.cache.capacity
            and max_rows <= self._max_rows
            and self._target.addresses == self._addresses
        )

    @property
    def lengths(self) -> list[int]:
        """The number of committed tokens of each sequence."""
        return self._target.cache.lengths

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Clear the cache and fill it with the tokens of these prompts."""
        self._target.cache.clear(len(prompts))
        self._overflowed = False
        self.read(prompts)

    @torch.inference_mode()
    def read(self, texts: Sequence[Sequence[int]]) -> None:
        """Append the tokens of each sequence to the cache, which must have space for them."""
        if any(self.lengths) and any(texts):
            # The row of an empty text is not committed.
            chains = [
                Tree.chain(text[0], text[1:]) if text else Tree.chain(0)
                for text in texts
            ]
            self._dynamic.hidden(chains)
        elif any(texts):
            self._target.read(texts)
        self._target.cache.commit([range(len(text)) for text in texts])

    @torch.inference_mode()
    def forward(
        self,
        trees: Sequence[Tree],
        requests: Sequence[Request],
        sampling: Sampling,
        fed: Fed = None,
    ) -> ForwardOutput:
        """Compute the trees' rows, which stay in the cache uncommitted until `commit`.

        With `fed`, for the tree of a draft model, the rows of the first `fed[b]` nodes are
        already in the cache. The output then has the candidates after the remaining nodes
        (`ForwardOutput.next_candidates`) and no picks.

        The values of probes may overflow, by an adapter or in float16. No draft attends to a
        probe, but 0 times NaN is NaN. So after an overflow the rows are computed again
        without probes, and all later forwards until the next prefill have no probes.
        """
        probed = any(tree.probed for tree in trees)
        if probed and self._overflowed:
            trees = [tree.unprobed() for tree in trees]
        output = self._forward(trees, requests, sampling, fed)
        if probed and not self._overflowed and not output.is_finite():
            self._overflowed = True
            warn_of_overflow()
            self._target.cache.clear_rest(fed)
            trees = [tree.unprobed() for tree in trees]
            output = self._forward(trees, requests, sampling, fed)
        return output

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the rows of these nodes of each tree in the cache."""
        self._target.cache.commit(paths)

    def drop(self, b: int) -> None:
        """Remove sequence b; the last sequence gets its index."""
        self._target.cache.drop(b)


@cache
def warn_of_overflow() -> None:
    """Log once that probes overflow."""
    getLogger(__name__).warning(
        "The values of adaptive tokens overflow: they draft no more. Texts stay the same"
    )


class Runners:
    """Creates runners, and reuses a runner that has CUDA graphs. For the arguments see Runner."""

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        static: bool | None = None,
        compile: bool = False,
        target: PreTrainedModel | None = None,
    ) -> None:
        self.static = static
        self._lm = lm
        self._compile = compile
        self._target = target
        self._idle: Runner | None = None
        self._lock = Lock()

    def take(self, *, batch: int, capacity: int, max_rows: int) -> Runner:
        """Return an idle runner with enough room in its cache for the batch, or a new runner."""
        with self._lock:  # so that two threads do not take the same runner
            runner = self._idle
            self._idle = None
        if runner is not None and runner.fits(
            batch=batch, capacity=capacity, max_rows=max_rows
        ):
            return runner
        del runner  # frees its memory for the new runner
        return Runner(
            self._lm,
            batch=batch,
            capacity=capacity,
            max_rows=max_rows,
            static=self.static,
            compile=self._compile,
            target=self._target,
        )

    def give(self, runner: Runner) -> None:
        """Take back a runner for reuse. A runner without graphs is dropped to free its memory."""
        if runner.static:
            self._idle = runner


def duration(began: float, ended: float) -> float:
    """Return the seconds between two readings of a clock, at least `TICK`.

    A clock with a coarse resolution, such as 10 ms in a sandbox, may return the same time twice.
    """
    return max(ended - began, TICK)
