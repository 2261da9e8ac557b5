"""Tree attention for Transformers' models, and a view of a model that uses it.

Tree attention is registered with Transformers under its own name. The runner passes a
(B, 1, groups * q, kv) mask through the library's model: 0 or True where a row attends, -inf
or False elsewhere. Without a mask the rows are a prompt and attention is causal.

    model                          view, on the same weights
    CausalLM                       CausalLM'      copied: contains a configuration or a gate
      Layer                          Layer'
        Attention  config              Attention'  config'
          Linear                         Linear   the same

All layers share one configuration, and the layers of an adapter share one gate. Changing
either in place would change the results of other threads. So a runner decodes through
copies of the modules that contain the configuration or the gate, and shares all other
modules. Moving, changing or replacing a weight affects the model and the view.

    B sequences, q rows each, kv columns of cache in use, `groups` query heads per key head
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from conf.architecture import UNSUPPORTED

NAME = "tree"
WIDE = "wide_tree"


class ProbeGate:
    """The probe rows of the current forward: rows `first` to `rows` - 1 of every sequence."""

    def __init__(self) -> None:
        self.first = 0
        self.rows = 0

    @classmethod
    def of(cls, lm: nn.Module) -> "ProbeGate":
        """Return the gate of a model's adapter, or an unused gate without an adapter."""
        gates = (getattr(module, "gate", None) for module in lm.modules())
        return next((gate for gate in gates if isinstance(gate, cls)), cls())

    @contextmanager
    def open(self, first: int, rows: int) -> Iterator[None]:
        """Apply the adapter to the rows from `first` on while the block runs."""
        self.first = first
        self.rows = rows if first < rows else 0
        try:
            yield
        finally:
            self.first = self.rows = 0

    def probes(self, y: Tensor) -> Tensor:
        """Return a view of the probe rows of y (..., d): (n, d), or (B, n, d) for a batch."""
        q, first = self.rows, self.first
        if y.shape[:-1].numel() == q:
            return y.view(q, -1)[first:]
        return y.view(-1, q, y.shape[-1])[:, first:]


def add_product(y: Tensor, inner: Tensor, outer: Tensor) -> None:
    """Add the product of `inner` (..., r) and `outer` (r, d) to y (..., d) in place.

    It takes as few operations as possible, because a forward of probes calls it hundreds of
    times. The operands have two dimensions: otherwise PyTorch copies `outer` for each
    sequence.
    """
    if y.dim() == 2:
        y.addmm_(inner, outer)
    else:
        y += (inner.flatten(0, 1) @ outer).view_as(y)


COPIED = (PreTrainedConfig, ProbeGate)


def tree_attention(
    module: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from (B, heads, q, d) queries to (B, kv_heads, kv, d) keys.

    Returns (B, q, heads, d), contiguous like the library's output: some models take a view
    of it. Raises ValueError for a feature of the model's attention that would otherwise be
    ignored.
    """
    unsupported = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    if unsupported:
        raise ValueError(f"tree attention does not support {', '.join(unsupported)}")
    output = attend(query, key, value, attention_mask, scaling)
    return output.transpose(1, 2).contiguous(), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """Return the output (B, heads, q, d) of `tree_attention`, before its transpose.

    The queries of a group become rows of their key's head, so that no key is copied.
    `attention_mask` has groups * q rows.
    """
    b, heads, q, d = query.shape
    kv_heads = key.shape[1]
    if attention_mask is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=q > 1,
            scale=scaling,
            enable_gqa=heads != kv_heads,
        )
    groups = heads // kv_heads
    if groups > 1:
        query = query.reshape(b, kv_heads, groups * q, d)
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(b, heads, q, -1)


def attend_wide(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """Compute `attend` in float64.

    In float32 the last bit depends on the number of rows and on the columns of the keys. At
    a rounding boundary a difference of one bit becomes a whole step of int8. Differences in
    float64 disappear when the result is rounded once, except for about one number in ten
    million.
    """
    wide = query.double(), key.double(), value.double()
    return attend(*wide, attention_mask, scaling)


def wide_attention(
    module: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute `tree_attention` in float64, and round once to the query's dtype."""
    wide = query.double(), key.double(), value.double()
    output, _ = tree_attention(module, *wide, attention_mask, scaling, **kwargs)
    return output.to(query.dtype), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask: the runner passes the masks."""


def view_of(
    lm: PreTrainedModel,
    replaced: Mapping[str, nn.Module] | None = None,
    *,
    wide: bool = False,
) -> PreTrainedModel:
    """Return a view with tree attention and with the modules of `replaced`, by name.

    With `wide`, attention computes in float64. The view sees later changes of the model's
    weights, but not of its modules. A view takes a millisecond for every five layers.
    """
    for name, function in ((NAME, tree_attention), (WIDE, wide_attention)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, _no_mask)
    model: Any = next(lm.modules())  # `lm` may be a weak proxy, which cannot be copied
    shared: dict[int, Any] = {
        id(model.get_submodule(name)): new for name, new in (replaced or {}).items()
    }
    _share(model, shared)
    view: PreTrainedModel = copy.deepcopy(model, shared)
    view.config._attn_implementation = WIDE if wide else NAME
    return view


def _share(module: nn.Module, shared: dict[int, Any]) -> bool:
    """Add to `shared`, by id, the parts of a module that a view shares.

    Returns True if the view shares the whole module.
    """
    if id(module) in shared:
        return False  # the module is replaced, so the view needs its own parent module
    children = [_share(child, shared) for child in module.children()]
    attributes = list(vars(module).values())
    whole = all(children) and not any(isinstance(item, COPIED) for item in attributes)
    if whole:
        shared[id(module)] = module
    else:
        for value in attributes:
            if value is not module._modules:
                _share_value(value, shared)
    return whole


def _share_value(value: Any, shared: dict[int, Any]) -> None:
    """Add to `shared` the parts of an attribute that a view shares.

    A forward that another library has wrapped, such as accelerate, is bound to its module
    and may be bound to objects that cannot be copied, such as a lock.
    """
    if isinstance(value, MethodType):
        _share_value(value.__self__, shared)
    elif isinstance(value, partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            _share_value(part, shared)
    elif not isinstance(value, (*COPIED, nn.Module)):
        shared[id(value)] = value
