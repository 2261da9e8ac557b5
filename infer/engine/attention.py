"""Tree attention for Transformers' models, and a view of a model that uses it.

Tree attention is registered with Transformers under a name of its own. The runner passes a
(B, 1, groups * q, kv) mask through the library's model: 0 or True where a row attends, -inf
or False elsewhere. Without a mask the rows are a prompt and attention is causal.

    model                          view, on the same weights
    CausalLM                       CausalLM'      copied: contains a configuration or a gate
      Layer                          Layer'
        Attention  config              Attention'  config'
          Linear                         Linear   the same

All layers share one configuration, and an adapter's layers one gate. Changing either in
place would change what other threads compute. So a runner decodes through copies of the
modules that contain one of them; all other modules are shared. Weights that move, change
or are replaced do so in both.

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
    """The probe rows of the current forward: `first` to `rows` of every sequence."""

    def __init__(self) -> None:
        self.first = 0
        self.rows = 0

    @classmethod
    def of(cls, lm: nn.Module) -> "ProbeGate":
        """Return the gate of a model's adapter, or an unused gate without an adapter."""
        gates = (getattr(module, "gate", None) for module in lm.modules())
        return next((gate for gate in gates if isinstance(gate, cls)), cls())

    @classmethod
    def adapts(cls, lm: nn.Module) -> bool:
        """Return True if a model has an adapter."""
        return any(isinstance(getattr(m, "gate", None), cls) for m in lm.modules())

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
        """Return a view of the gate's rows of y (..., d): (n, d), or (B, n, d) of several sequences."""
        q, first = self.rows, self.first
        if y.shape[:-1].numel() == q:
            return y.view(q, -1)[first:]
        return y.view(-1, q, y.shape[-1])[:, first:]


def add_product(y: Tensor, inner: Tensor, outer: Tensor) -> None:
    """Add the product of `inner` (..., r) and `outer` (r, d) to y (..., d).

    In as few operations as possible: a forward of probes has hundreds. Operands have two
    dimensions: otherwise PyTorch copies `outer` for each sequence.
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
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend from (B, heads, q, d) queries to (B, kv_heads, kv, d) keys.

    Returns (B, q, heads, d), contiguous as the library's own: some models take a view of
    it. Raises ValueError for a feature of the model's attention that would otherwise be
    ignored.
    """
    unsupported = [name for name in UNSUPPORTED if others.get(name) is not None]
    if unsupported:
        raise ValueError(f"tree attention has no {', '.join(unsupported)}")
    output = attend(query, key, value, attention_mask, scaling)
    return output.transpose(1, 2).contiguous(), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """Return attention (B, heads, q, d), see `tree_attention`.

    Grouped queries become rows of their key's head, so that no key is copied;
    `attention_mask` has these rows.
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

    In float32 the last bit depends on the number of rows and on the columns of the keys,
    and one bit at a border of rounding becomes a whole step of int8. Differences in
    float64 are lost in rounding the result once, but for one number in some ten millions.
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
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute `tree_attention` in float64, rounded once to the query's type."""
    wide = query.double(), key.double(), value.double()
    output, _ = tree_attention(module, *wide, attention_mask, scaling, **others)
    return output.to(query.dtype), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Make no mask: masks come from the runner."""


def view_of(
    lm: PreTrainedModel,
    replaced: Mapping[str, nn.Module] | None = None,
    *,
    wide: bool = False,
) -> PreTrainedModel:
    """Return a view with tree attention and with the modules in `replaced`, by name.

    With `wide` attention computes in float64. The view follows the model's weights, but
    not later changes of its modules. Takes a millisecond for every five layers.
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
    """Add the parts of a module that a view shares to `shared`, by id.

    Returns True if the view shares the whole module.
    """
    if id(module) in shared:
        return False  # replaced: the view has its own parent of it
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
    """Add the parts of an attribute that a view shares to `shared`.

    A forward that another library wraps, as accelerate does, is bound to its module, and
    perhaps to objects that cannot be copied, such as a lock.
    """
    if isinstance(value, MethodType):
        _share_value(value.__self__, shared)
    elif isinstance(value, partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            _share_value(part, shared)
    elif not isinstance(value, (*COPIED, nn.Module)):
        shared[id(value)] = value
