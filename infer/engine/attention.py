"""Tree attention for Transformers' models, registered under a name of its own, and the view that has it.

The runner hands a (B, 1, q, kv) boolean mask through the library's model (True = attend);
without one, the rows are a prompt and attention is causal. A model with ALiBi keeps the library's
attention under that name.

A runner decodes through a view of its model, on the same weights:

    model                          view
    CausalLM                       CausalLM'      a copy, as what holds a configuration or a gate is
      Layer                          Layer'
        Attention  config              Attention'  config'
          Linear                         Linear   the same

The library's attention reads its implementation from the configuration that all layers share, and a gate
belongs to all layers of an adapter. To change them on the model for one decoder would change what every other
thread computes. So a runner decodes through a view: copies of the modules that hold a configuration or a gate,
themselves or below them; all others are shared. The copies share the dictionaries of parameters, buffers
and hooks as well, so that weights that move, change or are replaced do so in both.

ALiBi (arXiv 2108.12409), as BLOOM has it, has no position embeddings, but slope x key position added to
each score, with a slope for each head.

    B sequences, q rows each, n columns of cache in use, H heads

The library takes a key's position from its column, or from a mask of padding. In a tree rivals lie in
columns side by side and share a position. So a tree's mask has the bias in it, by head, and the
library adds nothing to it; all else, its attention too, is the library's.
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
from transformers import AttentionInterface, PreTrainedConfig, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.bloom.modeling_bloom import build_alibi_tensor


def is_alibi(config: PretrainedConfig) -> bool:
    """Return whether masks of this architecture contain the bias. They are additive then: it has an attention
    of its own, which takes no other.
    """
    return config.model_type == "bloom"


def leave_to_masks(decoder: Any) -> Tensor:
    """Stop the decoder from adding a bias to a 4-D mask. Returns its (H,) slopes, in float32."""
    decoder.build_alibi_tensor = _beside
    two_places = torch.ones(1, 2, device=decoder.device)
    return build_alibi_tensor(two_places, decoder.num_heads, torch.float32)[:, 0, 1]


def _beside(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Return the bias that the decoder adds to a 4-D mask, none, or to one of padding: (B * H, 1, n)."""
    if attention_mask.ndim == 4:
        return torch.zeros(1, 1, 1, dtype=dtype, device=attention_mask.device)
    return build_alibi_tensor(attention_mask, num_heads, dtype)


def biased(attends: Tensor, places: Tensor, slopes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B, H, q, n) in `dtype`: slope x key position where a row attends, and -inf elsewhere.

    `attends` (B, 1, q, n) bool; `places` (B, n) positions of the tokens that the columns hold. The
    position is absolute, and rounded in narrow types, as the library's is and as in BLOOM's training.
    """
    bias = (slopes[:, None, None] * places[:, None, None]).to(dtype)
    return torch.where(attends, bias, float("-inf"))


class ProbeGate:
    """Which rows of the current forward are probes: those of every sequence from `first` on, of `rows`. None
    outside of `open`, where `rows` is 0.
    """

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
        self.first, self.rows = first, rows if first < rows else 0
        try:
            yield
        finally:
            self.first = self.rows = 0


NAME = "tree"
OWN = (PreTrainedConfig, ProbeGate)
BOUND = (MethodType, partial)  # a forward that is wrapped, as accelerate does, is bound to its module
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
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(b, heads, q, d).transpose(1, 2), None


@lru_cache(maxsize=1)  # all layers of a prompt ask for the same
def band(n: int, window: int, device: torch.device) -> Tensor:
    """Return (1, 1, n, n) bool: each row attends to itself and to the `window` - 1 rows before it."""
    rows = torch.ones(n, n, dtype=torch.bool, device=device)
    return (rows.tril() & rows.triu(1 - window))[None, None]


def register() -> None:
    """Make `attn_implementation="tree"` known to Transformers."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, own_mask)


def own_mask(*args: Any, config: PreTrainedConfig, **others: Any) -> Tensor | None:
    """Return the library's mask for ALiBi's own attention; elsewhere masks come from the runner."""
    return eager_mask(*args, **others) if is_alibi(config) else None


def view_of(lm: PreTrainedModel, replaced: Mapping[str, nn.Module] | None = None) -> PreTrainedModel:
    """Return a view with tree attention. It follows the model's weights, not a later change of its modules.
    It has the modules `replaced`, by names, in the place of the model's.

    Takes a millisecond for every five layers.
    """
    register()
    model: Any = next(lm.modules())  # `lm` may be a weak proxy, which cannot be copied
    shared: dict[int, Any] = {id(model.get_submodule(name)): new for name, new in (replaced or {}).items()}
    _share(model, shared)
    view = copy.deepcopy(model, shared)
    view.config._attn_implementation = NAME
    return view


def _share(module: nn.Module, shared: dict[int, Any]) -> bool:
    """Add to `shared`, by id as `deepcopy` wants it, what a view does not copy of a module and those below.

    Return whether that is the whole module.
    """
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
    """Add what a view does not copy of an attribute; of a bound function that is what it is bound to beside
    modules, such as a timer with a lock.
    """
    if isinstance(value, BOUND):
        for part in _bound(value):
            _share_value(part, shared)
    elif not isinstance(value, (*OWN, nn.Module)):
        shared[id(value)] = value


def _bound(function: MethodType | partial[Any]) -> list[Any]:
    """Return the parts of a bound function."""
    if isinstance(function, MethodType):
        return [function.__self__]
    return [function.func, *function.args, *function.keywords.values(), *vars(function).values()]
