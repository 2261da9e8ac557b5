"""The target model as four verbs: prefill, forward, commit, drop.

    B sequences, q rows each, d wide, V tokens

Knows the library's model and the cache; knows no drafting and no choosing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infer.attention import NAME
from infer.cache import TreeCache
from infer.gate import CLOSED, ProbeGate
from infer.head import Logits
from infer.layout import Layout, lay_out, mask
from infer.pick import Sampling
from infer.reading import Reading, Request
from infer.tree import Tree


class Runner:
    """Up to `batch` sequences on one model. `max_rows` bounds the nodes of a tree."""

    def __init__(self, lm: PreTrainedModel, *, capacity: int, max_rows: int, batch: int = 1) -> None:
        if lm.config._attn_implementation != NAME:
            raise ValueError(f"wanted a model with attn_implementation={NAME!r}")
        self._decoder, self._head = lm.get_decoder(), lm.get_output_embeddings()
        self._cache = TreeCache(
            lm.config,
            batch=batch,
            capacity=capacity + max(2, max_rows),
            dtype=lm.dtype,
            device=lm.device,
        )
        self._batch, self._capacity, self._device = batch, capacity, lm.device
        self._windows = windows(lm.config)
        self._gate = ProbeGate.of(lm)
        # One row alone takes slow paths of the CPU's kernels in narrow types (attention up to 3.9
        # times two rows): plain decoding runs its row twice, or speculation would be flattered.
        self._least = 2 if lm.device.type == "cpu" and lm.dtype.itemsize < 4 else 1

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, by sequence."""
        return self._cache.lengths

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Start over with these tokens in the cache. Raises ValueError when they do not fit."""
        longest = max(map(len, prompts))
        if len(prompts) > self._batch or longest > self._capacity:
            raise ValueError(
                f"{len(prompts)} prompts of up to {longest} tokens do not fit a cache of {self._batch} x "
                f"{self._capacity}"
            )
        self._cache.clear(len(prompts))
        if longest:
            # Shorter prompts are filled up behind their end, where causal attention never looks.
            ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
            self._hidden(ids, torch.arange(longest).expand(len(prompts), -1), None)
            self._cache.commit([range(len(prompt)) for prompt in prompts])

    @torch.inference_mode()
    def forward(self, trees: Sequence[Tree], requests: Sequence[Request], sampling: Sampling) -> Reading:
        """What the model says of each sequence's tree; its rows wait in the cache for `commit`."""
        layout = lay_out(trees, self.lengths, least=self._least)
        probed = any(tree.probed for tree in trees)
        with self._gate.open(layout.drafts if probed else CLOSED):
            ids, positions = torch.from_numpy(layout.ids), torch.from_numpy(layout.positions)
            hidden = self._hidden(ids, positions, layout).flatten(0, 1)
        return Reading(Logits(self._head, hidden, self._head(hidden)), layout, trees, requests, sampling)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the rows of these nodes of each tree."""
        self._cache.commit(paths)

    def drop(self, b: int) -> None:
        """Forget a sequence; the last one takes its place."""
        self._cache.drop(b)

    def _hidden(self, ids_Bq: Tensor, positions_Bq: Tensor, layout: Layout | None) -> Tensor:
        """(B, q, d); without a layout the rows are prompts."""
        self._cache.place(ids_Bq.shape[1])
        output = self._decoder(
            input_ids=ids_Bq.to(self._device),
            position_ids=positions_Bq.to(self._device),
            attention_mask=None if layout is None else self._masks(layout),
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.last_hidden_state

    def _masks(self, layout: Layout) -> Any:
        """The mask of all layers, or one for each kind of layer."""
        found = {
            kind: torch.from_numpy(mask(layout, self.lengths, self._cache.slots.end, window=window))
            for kind, window in self._windows.items()
        }
        found = {kind: value.to(self._device) for kind, value in found.items()}
        return found if len(found) > 1 else next(iter(found.values()))


def windows(config: Any) -> dict[str, int | None]:
    """The kinds of layers, and how far each sees; None is everything."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        kinds = {"full_attention" if window is None else "sliding_attention"}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
