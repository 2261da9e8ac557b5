"""The target model as four verbs: prefill, forward, commit, drop.

Knows the order in which a cache is filled; knows no drafting and no choosing.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from infer.forward import DynamicForward, Forward
from infer.parallel import shares
from infer.pick import Sampling
from infer.reading import Reading, Request
from infer.static import StaticForward
from infer.target import Target
from infer.tree import Tree


class Runner:
    """Up to `batch` sequences of up to `capacity` tokens on one model. `max_rows` bounds the nodes of a tree.

    `static` chooses fixed shapes, on CUDA as graphs: so it is there unless said otherwise, where the
    library knows the model to be free of data-dependent control flow and one process has all of it.
    `compile` has torch.compile fuse the decoder's kernels first, which takes a minute and pays from
    some thousand tokens on.
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
    ) -> None:
        if static is None:
            static = lm.device.type == "cuda" and lm._can_compile_fullgraph and shares(lm) == 1
        room = (StaticForward if static else DynamicForward).room(capacity, max_rows, batch)
        self.static = static
        self._batch, self._capacity, self._max_rows = batch, capacity, max_rows
        self._target = target = Target(lm, batch=batch, capacity=room)
        self._forward: Forward = (
            StaticForward(target, batch=batch, compile=compile) if static else DynamicForward(target)
        )

    def fits(self, *, batch: int, capacity: int, max_rows: int) -> bool:
        """Whether so many sequences, tokens and nodes find room."""
        return batch <= self._batch and capacity <= self._capacity and max_rows <= self._max_rows

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, by sequence."""
        return self._target.cache.lengths

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Start over with these tokens in the cache. Raises ValueError when they do not fit."""
        longest = max(map(len, prompts))
        if len(prompts) > self._batch or longest > self._capacity:
            raise ValueError(
                f"{len(prompts)} prompts of up to {longest} tokens do not fit a cache of {self._batch} x "
                f"{self._capacity}"
            )
        target = self._target
        target.cache.clear(len(prompts))
        if longest:
            # Shorter prompts are filled up behind their end, where causal attention never looks.
            ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
            target.cache.place(longest)
            positions = torch.arange(longest, device=target.device).expand(len(prompts), -1)
            target.hidden(ids.to(target.device), positions, None)
            target.cache.commit([range(len(prompt)) for prompt in prompts])

    @torch.inference_mode()
    def forward(
        self,
        trees: Sequence[Tree],
        requests: Sequence[Request],
        sampling: Sampling,
        fed: Sequence[int] | None = None,
    ) -> Reading:
        """What the model says of each sequence's tree; its rows wait in the cache for `commit`.

        A draft model's tree grows: the rows of its first `fed[b]` nodes wait there already, and the
        reading says what may follow the others (`Reading.following`), not what is picked.
        """
        return self._forward(trees, requests, sampling, fed)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the rows of these nodes of each tree."""
        self._target.cache.commit(paths)

    def drop(self, b: int) -> None:
        """Forget a sequence; the last one takes its place."""
        self._target.cache.drop(b)
