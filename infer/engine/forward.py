"""One forward of trees through the library's model.

    B sequences, D rows of drafts and P of probes (q = D + P), n columns of cache in use

`DynamicForward` computes exactly the rows and columns in use; static.py pads both to
fixed shapes. If a model is divided over ranks, all ranks use rank 0's values for every
decision (picks, drafts, costs). This holds also for a draft model that is whole on each
rank. Ranks with different decisions would wait for each other forever.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from conf.architecture import key_heads, logit_scale, windows
from infer.engine.attention import ProbeGate, view_of
from infer.engine.cache import TreeCache
from infer.engine.gate import with_gate
from infer.engine.head import PreviousTokenHead
from infer.engine.native import NativeDecoder, decoder_of
from infer.engine.output import LazyOutput, Request
from infer.engine.packed import rounded_type
from infer.engine.pick import Logits
from infer.engine.sampling import Sampling
from infer.trees.tree import Fed, FlatTrees, Tree, extent, flatten, mask

T = TypeVar("T")


class Target:
    """A model's decoder, head and gate, and a cache of `capacity` rows per sequence.

    `agree` returns rank 0's tensor on every rank. The ranks are the ranks that `lm` is
    divided over, or for a draft model the ranks that its `target` is divided over.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        batch: int,
        capacity: int,
        target: PreTrainedModel | None = None,
    ) -> None:
        self.correction = PreviousTokenHead.of(lm)
        rounded = rounded_type(lm) is not None
        # In these types a row's products do not depend on other rows. Attention in float64
        # does not either.
        wide = rounded or (lm.device.type == "cpu" and lm.dtype == torch.bfloat16)
        # Other threads may decode on the same model: a gate and a configuration of one's own.
        self.gate = ProbeGate()
        self.fused = decoder_of(lm, self.gate, wide=wide)
        if self.fused is None:
            lm = view_of(lm, wide=wide)
            self.gate = ProbeGate.of(lm)
        self.decoder: Any = lm.get_decoder()
        self.head: Any = with_gate(lm.get_output_embeddings(), self.gate)
        self.dtype = torch.float32 if rounded else lm.dtype
        self.device = lm.device
        self.mask_dtype = torch.float64 if wide else self.dtype
        cache_type = torch.float64 if rounded else self.dtype
        self.windows = windows(lm.config)
        self._scale = logit_scale(lm.config)
        self.groups = lm.config.num_attention_heads // key_heads(lm.config)
        if isinstance(self.fused, NativeDecoder):
            self.mask_dtype, self.groups = torch.bool, 1
            cache_type = self.fused.cache_type
        self.agree = agreement(target or lm)
        self.cache = TreeCache(
            lm.config,
            batch=batch,
            capacity=capacity,
            dtype=cache_type,
            device=lm.device,
            shares=shares(lm),
        )

    @property
    def addresses(self) -> tuple[int, ...]:
        """The present addresses of the weights."""
        return addresses_of(self.decoder, self.head)

    def hidden(
        self,
        ids_Bq: Tensor,
        positions_Bq: Tensor,
        masks: Mapping[str, Tensor | None] | None = None,
    ) -> Tensor:
        """Return hidden states (B, q, d), and write the rows' keys and values to the slots.

        The hidden states include the model's scale of logits, so the head's output is the
        logits. `masks` are (B, 1, q, n) by kind of layer. Without masks the rows are prompts,
        or one row that attends to the whole cache.
        """
        attention_mask: Any = masks or dict.fromkeys(self.windows)
        if self.groups > 1:  # repeated here once, so that not every layer has to do it
            attention_mask = {
                kind: None if mask is None else mask.repeat(1, 1, self.groups, 1)
                for kind, mask in attention_mask.items()
            }
        if self.fused is not None:
            return self.fused(ids_Bq, positions_Bq, attention_mask, self.cache)
        if masks is None:
            attention_mask = None
        elif len(masks) == 1:
            (attention_mask,) = attention_mask.values()
        output = self.decoder(
            input_ids=ids_Bq,
            position_ids=positions_Bq,
            attention_mask=attention_mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden if self._scale == 1 else hidden * self._scale

    def read(self, texts: Sequence[Sequence[int]]) -> None:
        """Compute texts from position 0 on. Their rows are in the cache, uncommitted."""
        n = max(map(len, texts))
        # A shorter text is padded at its end, so with causal attention no token sees padding.
        ids = torch.tensor([[*text, *[0] * (n - len(text))] for text in texts])
        self.cache.set_slots(n)
        positions = torch.arange(n, device=self.device).expand(len(texts), -1)
        masks: dict[str, Any] | None = None
        if any(window and window < n for window in self.windows.values()):
            causal = torch.ones(n, n, dtype=torch.bool, device=self.device).tril()
            masks = {
                kind: causal.triu(1 - window)[None, None] if window else None
                for kind, window in self.windows.items()
            }
        self.hidden(ids.to(self.device), positions, masks)


def addresses_of(*modules: nn.Module) -> tuple[int, ...]:
    """Return the addresses of all tensors of modules. They change if a model is moved."""
    return tuple(
        tensor.data_ptr()
        for module in modules
        for tensor in chain(module.parameters(), module.buffers())
    )


def context_length(config: PretrainedConfig) -> int:
    """Return the context length of a model in tokens."""
    length: int = config.max_position_embeddings
    return length


class DynamicForward:
    """A forward with exactly the rows and columns in use, without CUDA graphs."""

    def __init__(self, target: Target) -> None:
        self._target = target
        # On a CPU one row of a narrow type is slower than two rows (attention up to 3.9
        # times). So plain decoding runs its row twice; otherwise speedups would be too high.
        narrow = target.device.type == "cpu" and target.dtype.itemsize < 4
        self._min_rows = 2 if narrow else 1

    @staticmethod
    def cache_rows(capacity: int, max_rows: int, batch: int) -> int:
        """Return the number of cache rows for `capacity` tokens and a tree of `max_rows`.

        In a batch one tree may have the most drafts and another tree the most probes, and
        both numbers are padded.
        """
        return capacity + (max_rows + 1 if batch == 1 else 2 * max_rows)

    def __call__(
        self,
        trees: Sequence[Tree],
        requests: Sequence[Request],
        sampling: Sampling,
        fed: Fed = None,
    ) -> LazyOutput:
        """Compute the trees' rows, which follow the committed rows of the cache."""
        target = self._target
        flat, hidden_Bqd = self.hidden(trees, fed)
        hidden = hidden_Bqd.flatten(0, 1)
        logits = Logits(target.head, hidden, target.head(hidden))
        return LazyOutput(
            logits, flat, trees, requests, sampling, target.agree, target.correction
        )

    def hidden(
        self, trees: Sequence[Tree], fed: Fed = None
    ) -> tuple[FlatTrees, Tensor]:
        """Return the rows, and the decoder's hidden states (B, q, d)."""
        target = self._target
        cache = target.cache
        _, probes = extent(trees)
        flat = flatten(trees, cache.lengths, fed=fed, drafts=self._min_rows - probes)
        q = flat.ids.shape[1]
        cache.set_slots(q, fed)
        ids = torch.from_numpy(flat.ids).to(target.device)
        positions = torch.from_numpy(flat.positions).to(target.device)
        with target.gate.open(flat.drafts, q):
            return flat, target.hidden(ids, positions, self._masks(flat))

    def _masks(self, flat: FlatTrees) -> dict[str, Tensor] | None:
        """Return masks by kind of layer; None for a single row that attends to all columns."""
        cache = self._target.cache
        end = cache.slots.end
        windows = self._target.windows
        single = flat.attends.size == 1  # one row, and no fed nodes before it
        if single and all(w is None or end <= w for w in windows.values()):
            return None
        masks = {}
        for kind, window in windows.items():
            attends = torch.from_numpy(mask(flat, cache.lengths, end, window=window))
            attends = attends.to(self._target.device)
            masks[kind] = additive(attends, self._target.mask_dtype)
        return masks


def additive(attends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask of a boolean mask: 0 where a row attends, -inf elsewhere.

    For `dtype` bool, return the mask itself.
    """
    if dtype == torch.bool:
        return attends
    zeros = torch.zeros_like(attends, dtype=dtype)
    return zeros.masked_fill(~attends, float("-inf"))


def shares(lm: PreTrainedModel) -> int:
    """Return the number of ranks that a model is divided over."""
    return lm.tp_size or 1


def agreement(lm: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return a function that returns rank 0's tensor on every rank."""

    def agreed(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, 0)
        return tensor

    return agreed if shares(lm) > 1 else lambda tensor: tensor


def agreed_value(lm: PreTrainedModel, value: T) -> T:
    """Return rank 0's value on every rank."""
    if shares(lm) == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]
