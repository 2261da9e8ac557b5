"""Runners of one model, kept from one call to the next where a new one would cost seconds.

On a GPU a runner's graphs hold the addresses of its cache: another runner captures, and compiles, anew.
"""

from threading import Lock

from transformers import PreTrainedModel

from infer.engine.runner import Runner


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
        self.static, self._lm, self._compile, self._beside = static, lm, compile, beside
        self._kept: Runner | None = None
        self._lock = Lock()

    def take(self, *, batch: int, capacity: int, max_rows: int) -> Runner:
        """One that nobody uses and that fits, or a new one."""
        with self._lock:  # or two threads take the same
            kept, self._kept = self._kept, None
        if kept is not None and kept.fits(batch=batch, capacity=capacity, max_rows=max_rows):
            return kept
        del kept  # its memory makes room for the new one's
        return Runner(
            self._lm,
            capacity=capacity,
            max_rows=max_rows,
            batch=batch,
            static=self.static,
            compile=self._compile,
            beside=self._beside,
        )

    def give(self, runner: Runner) -> None:
        """Back from a text that has ended; one without graphs is not worth its memory."""
        if runner.static:
            self._kept = runner
