"""A model as four verbs: prefill or read, forward, commit, drop.

Knows the order in which a cache is filled; knows no drafting and no sampling.
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
    """Up to `batch` sequences of up to `capacity` tokens on one model.

    A tree has up to `max_rows` nodes. `static` selects fixed shapes, on CUDA as graphs:
    the default there if control flow depends on no data and one process has the whole
    model. `compile` fuses the kernels first. `target` is the model that `lm` drafts for.
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
        self._capacity = capacity
        self._max_rows = max_rows
        self._target = Target(lm, batch=batch, capacity=rows, target=target)
        self._addresses = self._target.addresses
        self._overflowed = False
        self._dynamic = DynamicForward(self._target)
        self._forward: StaticForward | DynamicForward = self._dynamic
        if static:
            self._forward = StaticForward(self._target, batch=batch, compile=compile)

    def fits(self, *, batch: int, capacity: int, max_rows: int) -> bool:
        """Return True if the request fits and no weight has moved.

        CUDA graphs hold addresses of weights.
        """
        return (
            batch <= self._batch
            and capacity <= self._capacity
            and max_rows <= self._max_rows
            and self._target.addresses == self._addresses
        )

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, by sequence."""
        return self._target.cache.lengths

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Start over with these tokens in the cache."""
        self._target.cache.clear(len(prompts))
        self._overflowed = False
        self.read(prompts)

    @torch.inference_mode()
    def read(self, texts: Sequence[Sequence[int]]) -> None:
        """Append these tokens of each sequence to the cache, which has space for them."""
        if any(self.lengths) and any(texts):
            # An empty text gets a row that is not committed.
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
        """Compute the trees' rows, which wait in the cache for `commit`.

        With `fed`, for a draft model's tree, the rows of the first `fed[b]` nodes wait
        there already. The output then has the candidates after the other nodes
        (`ForwardOutput.next_candidates`) and no picks.

        An adapter may overflow. No draft attends to a probe, but 0 times NaN is NaN: then
        the rows are computed again without probes, here and for the rest of the texts.
        """
        probed = self._target.adapted and any(tree.probed for tree in trees)
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
        """Keep the rows of these nodes of each tree."""
        self._target.cache.commit(paths)

    def drop(self, b: int) -> None:
        """Forget a sequence; the last one takes its place."""
        self._target.cache.drop(b)


@cache
def warn_of_overflow() -> None:
    """Warn once that the adapter is of no use."""
    getLogger(__name__).warning(
        "The adapter's values overflow: adaptive tokens draft no more. Texts stay the same"
    )


class Runners:
    """Gives each text a runner of its own; `static`, `compile`, `target`: see Runner."""

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
        """Return an idle runner that fits, or a new one."""
        with self._lock:  # or two threads could take the same one
            runner = self._idle
            self._idle = None
        if runner is not None and runner.fits(
            batch=batch, capacity=capacity, max_rows=max_rows
        ):
            return runner
        del runner  # frees its memory for the new one
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
        """Take back a runner; one without graphs is not worth its memory."""
        if runner.static:
            self._idle = runner


def duration(began: float, ended: float) -> float:
    """Return the seconds between two readings of a clock, at least `TICK`.

    A clock that ticks every 10 ms, as in a sandbox, may read the same twice.
    """
    return max(ended - began, TICK)
