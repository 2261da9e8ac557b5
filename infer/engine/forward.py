"""One forward of trees through the library's model.

    B sequences, D rows of drafts and P of probes (q = D + P), n columns of cache in use, V tokens

`DynamicForward` computes as many rows and columns as there are; static.py fills both up to fixed shapes.
Where a model is divided over ranks, whatever decides (picks, drafts, costs) is rank 0's on every rank, also of
a draft model, which is whole on each: ranks that chose differently would wait for each other for ever.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from infer.engine.attention import ProbeGate, biased, is_alibi, leave_to_masks, view_of
from infer.engine.cache import TreeCache
from infer.engine.output import LazyOutput, Request
from infer.engine.pick import Logits
from infer.engine.sampling import Sampling
from infer.trees.tree import Fed, FlatTrees, Tree, flatten, key_positions, mask

T = TypeVar("T")
TRAINED = 2048  # tokens of a sequence in BLOOM's training (arXiv 2211.05100)


class Target:
    """Decoder, head, gate, `slopes` (H,) of ALiBi, and a cache of `capacity` rows of up to `batch` sequences.

    `agree` makes what decides the same on all ranks: those that the model is divided over, or those that
    `beside` is, where every rank has a whole copy of `lm` that drafts for it.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        batch: int,
        capacity: int,
        beside: PreTrainedModel | None = None,
    ) -> None:
        lm = view_of(lm)  # several decode on one model at a time
        self.decoder: Any = lm.get_decoder()
        self.head: Any = lm.get_output_embeddings()
        self.dtype = lm.dtype
        self.device = lm.device
        self.gate = ProbeGate.of(lm)
        self.windows = windows(lm.config)
        self.slopes = leave_to_masks(self.decoder) if is_alibi(lm.config) else None
        self.agree = agreement(beside or lm)
        self.cache = TreeCache(
            lm.config,
            batch=batch,
            capacity=capacity,
            dtype=lm.dtype,
            device=lm.device,
            shares=shares(lm),
        )

    @property
    def places(self) -> tuple[int, ...]:
        """Where the weights lie now."""
        return places_of(self.decoder, self.head)

    def hidden(
        self,
        ids_Bq: Tensor,
        positions_Bq: Tensor,
        masks: Mapping[str, Tensor | None] | None,
    ) -> Tensor:
        """Return (B, q, d), the rows in the slots of the cache. `masks` (B, 1, q, columns), with ALiBi's slopes
        (B, H, q, columns), go by kind of layer; without one the rows are prompts, or one row that sees all
        there is.
        """
        output = self.decoder(
            input_ids=ids_Bq,
            position_ids=positions_Bq,
            attention_mask=masks
            if masks is None or len(masks) > 1
            else next(iter(masks.values())),
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state


def places_of(*modules: nn.Module) -> tuple[int, ...]:
    """Return the addresses of all tensors of modules: those of a model that was moved are others."""
    return tuple(
        tensor.data_ptr()
        for m in modules
        for tensor in chain(m.parameters(), m.buffers())
    )


def windows(config: Any) -> dict[str, int | None]:
    """Return the attention window of each kind of layer; None is no window."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        kinds = {"full_attention" if window is None else "sliding_attention"}
    return {
        kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)
    }


def context_length(config: PretrainedConfig) -> int:
    """Return the most tokens of a text; with ALiBi `seq_length`, or BLOOM's 2,048, which it was trained on."""
    learned = getattr(config, "max_position_embeddings", None) or getattr(
        config, "seq_length", None
    )
    return learned or TRAINED


class DynamicForward:
    """As many rows and columns as there are: nothing is computed in vain, and every launch is paid for."""

    def __init__(self, target: Target) -> None:
        self._target = target
        # One row alone takes slow paths of the CPU's kernels in narrow types (attention up to 3.9
        # times two rows): plain decoding runs its row twice, or speculation would be flattered.
        self._least = (
            2 if target.device.type == "cpu" and target.dtype.itemsize < 4 else 1
        )

    @staticmethod
    def room(capacity: int, max_rows: int, batch: int) -> int:
        """Return the rows of the cache that sequences of `capacity` tokens and the trees behind them take.

        Of several trees one may have the most drafts and another the most probes.
        """
        return capacity + (max_rows + 1 if batch == 1 else 2 * max_rows)

    def __call__(
        self,
        trees: Sequence[Tree],
        requests: Sequence[Request],
        sampling: Sampling,
        fed: Fed = None,
    ) -> LazyOutput:
        """Compute the trees' rows, which wait in the cache behind the committed ones."""
        target = self._target
        flat, hidden_Bqd = self.hidden(trees, fed)
        hidden = hidden_Bqd.flatten(0, 1)
        logits = Logits(target.head, hidden, target.head(hidden))
        return LazyOutput(logits, flat, trees, requests, sampling, target.agree)

    def hidden(
        self, trees: Sequence[Tree], fed: Fed = None
    ) -> tuple[FlatTrees, Tensor]:
        """Return the rows, and (B, q, d) what the decoder makes of them."""
        target = self._target
        cache = self._target.cache
        probes = max(len(tree.tokens) - tree.probes_from for tree in trees)
        flat = flatten(trees, cache.lengths, fed=fed, drafts=self._least - probes)
        cache.place(flat.ids.shape[1], fed)
        ids = torch.from_numpy(flat.ids).to(target.device)
        positions = torch.from_numpy(flat.positions).to(target.device)
        with target.gate.open(flat.drafts, flat.ids.shape[1]):
            return flat, target.hidden(ids, positions, self._masks(flat))

    def _masks(self, flat: FlatTrees) -> dict[str, Tensor] | None:
        """Return masks by kind of layer; none for a row that is alone and sees everything."""
        target = self._target
        lengths = self._target.cache.lengths
        end = self._target.cache.slots.end
        alone = flat.seen.size == 1  # and not behind rows that it may not see
        if (
            alone
            and target.slopes is None
            and all(w is None or end <= w for w in target.windows.values())
        ):
            return None
        masks = {
            kind: torch.from_numpy(mask(flat, lengths, end, window=window)).to(
                target.device
            )
            for kind, window in target.windows.items()
        }
        if target.slopes is None:
            return masks
        at = torch.from_numpy(key_positions(flat, lengths, end)).to(target.device)
        return {
            kind: biased(attends, at, target.slopes, target.dtype)
            for kind, attends in masks.items()
        }


def shares(lm: PreTrainedModel) -> int:
    """Return over how many ranks a model is divided."""
    return lm.tp_size or 1


def agreement(lm: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return a function that gives every rank the tensor of rank 0."""

    def agreed(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, 0)
        return tensor

    return agreed if shares(lm) > 1 else lambda tensor: tensor


def agreed_value(lm: PreTrainedModel, value: T) -> T:
    """Rank 0's value on every rank."""
    if shares(lm) == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]
