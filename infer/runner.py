"""The target model as three verbs: prefill, forward, commit.

Knows the library's model and the cache; knows no drafting and no choosing.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from infer.attention import NAME
from infer.cache import TreeCache
from infer.gate import CLOSED, ProbeGate
from infer.tree import Tree, ancestors, depths

RESCORED = 8  # top logits computed again in float32


class Runner:
    """One sequence on one model. `max_rows` bounds the nodes of a tree."""

    def __init__(self, lm: PreTrainedModel, *, capacity: int, max_rows: int) -> None:
        if lm.config._attn_implementation != NAME:
            raise ValueError(f"wanted a model with attn_implementation={NAME!r}")
        self._decoder, self._head = lm.get_decoder(), lm.get_output_embeddings()
        self._cache = TreeCache(
            lm.config, capacity=capacity + max(2, max_rows), dtype=lm.dtype, device=lm.device
        )
        self._device, self._gate = lm.device, ProbeGate.of(lm)
        # One row alone takes slow paths of the CPU's kernels in narrow types (attention up to 3.9
        # times two rows): plain decoding runs its row twice, or speculation would be flattered.
        self._doubles = lm.device.type == "cpu" and lm.dtype != torch.float32
        self._masks: dict[tuple[int, ...], Tensor] = {}

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._cache.length

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> None:
        """Start over with these tokens in the cache. Raises ValueError when they do not fit."""
        if len(tokens) > self._cache.capacity:
            raise ValueError(f"{len(tokens)} tokens do not fit a cache of {self._cache.capacity}")
        self._cache.clear()
        if tokens:
            self._hidden(tokens, torch.arange(len(tokens)), None)
            self._cache.commit(range(len(tokens)))

    @torch.inference_mode()
    def forward(self, tree: Tree) -> Tensor:
        """(q, V) float32 logits of the tree's nodes; its rows wait in the cache for `commit`."""
        tokens, parents = tree.tokens, tree.parents
        if self._doubles and len(tokens) == 1:
            tokens, parents = tokens * 2, (-1, -1)
        probed = tree.probes_from < len(tree.tokens)
        with self._gate.open(tree.probes_from if probed else CLOSED):
            hidden = self._hidden(tokens, depths(parents) + self.length, self._mask(parents))
        return self._logits(hidden[: len(tree.tokens)])

    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows of these nodes."""
        self._cache.commit(path)

    def _hidden(self, tokens: Sequence[int], positions: Tensor, mask: Tensor | None) -> Tensor:
        output = self._decoder(
            input_ids=torch.tensor([tokens], device=self._device),
            position_ids=positions[None].to(self._device),
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.last_hidden_state[0]

    def _mask(self, parents: tuple[int, ...]) -> Tensor:
        """(1, 1, q, length + q), a view: one wide mask per shape serves every length."""
        if parents not in self._masks:
            cached = torch.ones(len(parents), self._cache.capacity, dtype=torch.bool)
            wide = torch.cat([cached, ancestors(parents)], dim=1)
            self._masks[parents] = wide.to(self._device)[None, None]
        return self._masks[parents][..., self._cache.capacity - self.length :]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits; in a narrower type the top ones are computed again in float32, so that
        a near-tie does not depend on how many rows the forward had.
        """
        logits = self._head(hidden).float()
        if hidden.dtype != torch.float32:
            top = logits.topk(RESCORED, dim=-1).indices
            weight_qtd = F.embedding(top, self._head.weight).float()
            logits.scatter_(1, top, torch.bmm(weight_qtd, hidden.float()[..., None])[..., 0])
        return logits
