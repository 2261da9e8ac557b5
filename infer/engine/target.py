"""The library's model in the parts that decoding uses, and its cache.

B sequences, q rows each, d wide
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from infer.engine.agreement import agreement, shares
from infer.engine.alibi import is_alibi, leave_to_masks
from infer.engine.attention import view_of
from infer.engine.cache import TreeCache
from infer.engine.gate import ProbeGate

TRAINED = 2048  # tokens of a sequence in BLOOM's training (arXiv 2211.05100)


class Target:
    """Decoder, head, gate and cache; `slopes` (H,) where positions are ALiBi's. The cache has room for
    `capacity` rows of up to `batch` sequences.

    `agree` makes what decides the same on all ranks: those that the model is divided over, or those that
    `beside` is, where every rank has a whole copy of `lm` that drafts for it.
    """

    def __init__(
        self, lm: PreTrainedModel, *, batch: int, capacity: int, beside: PreTrainedModel | None = None
    ) -> None:
        lm = view_of(lm)  # several decode on one model at a time
        self.decoder: Any = lm.get_decoder()
        self.head: Any = lm.get_output_embeddings()
        self.dtype, self.device = lm.dtype, lm.device
        self.gate, self.windows = ProbeGate.of(lm), windows(lm.config)
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

    def hidden(self, ids_Bq: Tensor, positions_Bq: Tensor, masks: Mapping[str, Tensor | None] | None) -> Tensor:
        """(B, q, d), the rows in the slots of the cache; `masks` (B, 1, q, columns), with ALiBi's slopes
        (B, H, q, columns), by kind of layer, and without one the rows are prompts, or one row that sees
        all there is.
        """
        output = self.decoder(
            input_ids=ids_Bq,
            position_ids=positions_Bq,
            attention_mask=masks if masks is None or len(masks) > 1 else next(iter(masks.values())),
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state


def places_of(*modules: nn.Module) -> tuple[int, ...]:
    """Return the addresses of all tensors of modules: those of a model that was moved are others."""
    return tuple(tensor.data_ptr() for m in modules for tensor in chain(m.parameters(), m.buffers()))


def windows(config: Any) -> dict[str, int | None]:
    """The kinds of layers, and how far each sees; None is everything."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        kinds = {"full_attention" if window is None else "sliding_attention"}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def context_length(config: PretrainedConfig) -> int:
    """The most tokens of a text. ALiBi's positions have no end; what a model was trained on has: its
    configuration says so in `seq_length`, or it was BLOOM's 2,048.
    """
    learned = getattr(config, "max_position_embeddings", None) or getattr(config, "seq_length", None)
    return learned or TRAINED
