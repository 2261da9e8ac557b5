"""Tree attention for Transformers' models, registered under a name of its own, and the view that has it.

The runner hands a (B, 1, q, kv) boolean mask through the library's model (True = attend);
without one, the rows are a prompt and attention is causal. A model with ALiBi keeps the library's
attention under that name.

    model                          view, on the same weights
    CausalLM                       CausalLM'      a copy, as what holds a configuration or a gate is
      Layer                          Layer'
        Attention  config              Attention'  config'
          Linear                         Linear   the same

To change the configuration that all layers share, or the gate of an adapter, would change what other threads
compute. So a runner decodes through copies of the modules that hold either, themselves or below them, which
share all else: weights that move, change or are replaced do so in both.

ALiBi (arXiv 2108.12409), as BLOOM has it, adds slope x key position to each score, with a slope for each head.
The library takes a key's position from its column; in a tree rivals lie side by side and share a position. So a
tree's mask has the bias in it, by head, and the library adds nothing to it.

    B sequences, q rows each, n columns of cache in use, H heads
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    PreTrainedConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.bloom.modeling_bloom import build_alibi_tensor


def is_alibi(config: PretrainedConfig) -> bool:
    """Return whether masks contain the bias and are additive, for an attention of the architecture's own."""
    return config.model_type == "bloom"


def leave_to_masks(decoder: Any) -> Tensor:
    """Stop the decoder from adding a bias to a 4-D mask. Returns its (H,) slopes, in float32."""
    decoder.build_alibi_tensor = _beside
    two_places = torch.ones(1, 2, device=decoder.device)
    return build_alibi_tensor(two_places, decoder.num_heads, torch.float32)[:, 0, 1]


def _beside(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    if attention_mask.ndim == 4:
        return torch.zeros(1, 1, 1, dtype=dtype, device=attention_mask.device)
    return build_alibi_tensor(attention_mask, num_heads, dtype)


def biased(
    attends: Tensor, places: Tensor, slopes: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return (B, H, q, n): slope x key position where a row attends, -inf elsewhere; of `attends` (B, 1, q, n)
    and the columns' `places` (B, n), absolute and rounded in narrow types as in BLOOM's training.
    """
    bias = (slopes[:, None, None] * places[:, None, None]).to(dtype)
    return torch.where(attends, bias, float("-inf"))


class ProbeGate:
    """Which rows of the current forward are probes: of every sequence those from `first` on, of `rows`."""

    def __init__(self) -> None:
        self.first = self.rows = 0

    @classmethod
    def of(cls, lm: nn.Module) -> "ProbeGate":
        """Return the gate of a model's adapter; for a model without one, a gate on nothing."""
        gates = (getattr(module, "gate", None) for module in lm.modules())
        return next((gate for gate in gates if isinstance(gate, cls)), cls())

    @contextmanager
    def open(self, first: int, rows: int) -> Iterator[None]:
        """Let the adapter act on the rows from `first` on while the block lasts, if there are any."""
        self.first = first
        self.rows = rows if first < rows else 0
        try:
            yield
        finally:
            self.first = self.rows = 0


NAME = "tree"
OWN = (PreTrainedConfig, ProbeGate)
BEYOND = ("softcap", "s_aux", "position_bias", "alibi")


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend from (B, heads, q, d) queries to (B, kv_heads, kv, d) keys; returns (B, q, heads, d).

    Grouped queries are folded into rows of their key's head, so that no key is copied.
    Raises ValueError for what a model's attention has beyond that: it would silently be left out.
    """
    beyond = [name for name in BEYOND if others.get(name) is not None]
    if beyond:
        raise ValueError(f"tree attention has no {', '.join(beyond)}")
    b, heads, q, d = query.shape
    kv_heads, kv = key.shape[1:3]
    grouped = heads != kv_heads
    if attention_mask is None and sliding_window and kv > sliding_window:
        attention_mask = band(kv, sliding_window, query.device)
    if attention_mask is None:
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=q > 1, scale=scaling, enable_gqa=grouped
        )
        return output.transpose(1, 2), None
    if grouped:
        groups = heads // kv_heads
        query = query.reshape(b, kv_heads, groups * q, d)
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(b, heads, q, d).transpose(1, 2), None


@lru_cache(maxsize=1)  # all layers of a prompt ask for the same
def band(n: int, window: int, device: torch.device) -> Tensor:
    """Return (1, 1, n, n) bool: each row attends to itself and to the `window` - 1 rows before it."""
    rows = torch.ones(n, n, dtype=torch.bool, device=device)
    return (rows.tril() & rows.triu(1 - window))[None, None]


def _own_mask(*args: Any, config: PreTrainedConfig, **others: Any) -> Tensor | None:
    """Return the library's mask for ALiBi's own attention; elsewhere masks come from the runner."""
    return eager_mask(*args, **others) if is_alibi(config) else None


def view_of(
    lm: PreTrainedModel, replaced: Mapping[str, nn.Module] | None = None
) -> PreTrainedModel:
    """Return a view with tree attention, and with the modules `replaced` by name. It follows the model's
    weights, not a later change of its modules. Takes a millisecond for every five layers.
    """
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, _own_mask)
    model: Any = next(lm.modules())  # `lm` may be a weak proxy, which cannot be copied
    shared: dict[int, Any] = {
        id(model.get_submodule(name)): new for name, new in (replaced or {}).items()
    }
    _share(model, shared)
    view = copy.deepcopy(model, shared)
    view.config._attn_implementation = NAME
    return view


def _share(module: nn.Module, shared: dict[int, Any]) -> bool:
    """Add to `shared`, by id, what a view does not copy of a module; return whether that is all of it."""
    if id(module) in shared:
        return False  # replaced: what holds it is the view's own
    below = [_share(child, shared) for child in module.children()]
    attributes = list(vars(module).values())
    whole = all(below) and not any(isinstance(value, OWN) for value in attributes)
    if whole:
        shared[id(module)] = module
    else:
        for value in attributes:
            if value is not module._modules:
                _share_value(value, shared)
    return whole


def _share_value(value: Any, shared: dict[int, Any]) -> None:
    """Add what a view does not copy of an attribute. A forward that is wrapped, as accelerate does, is bound to
    its module, and perhaps to more, such as a timer with a lock, which is shared.
    """
    if isinstance(value, MethodType):
        _share_value(value.__self__, shared)
    elif isinstance(value, partial):
        for part in (
            value.func,
            *value.args,
            *value.keywords.values(),
            *vars(value).values(),
        ):
            _share_value(part, shared)
    elif not isinstance(value, (*OWN, nn.Module)):
        shared[id(value)] = value
