"""Attention of a layout's columns: the trunk by a plain causal kernel, the branches by
a mask.

The trunk never sees a branch, so only the branch rows need a mask. Shape legend: r
rows, n trunk columns, m branch columns, c = n + m. A branch column of offset j at
position t sees the t - j + 1 first columns of the trunk, the j - 1 columns before it
and itself (drawn in train/objective.py). In a layer with a sliding window of W it sees
none of them whose position is t - W or less, as the trunk's own columns do:

    W = 3                trunk 0 1 2 3 4    branch 3 4 5
    position 3, j = 1          · 1 1 · ·           1 · ·
    position 4, j = 2          · · 1 · ·           1 1 ·
    position 5, j = 3          · · · · ·           1 1 1
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from conf.architecture import layer_window
from train import window_attention

Mask = Tensor | BlockMask
# Each layer's (r, kv_heads, n, d) keys and values of the trunk.
TrunkKeys = dict[nn.Module, tuple[Tensor, Tensor]]
BLOCK = 128  # rows, and columns, of a block of flex attention's mask
FLEX = "flex"
DENSE = "dense"


def branch_kernel(attention: str, device: str, *, dropout: float) -> str:
    """Return the kernel of the branches, flex or dense, for objective.attention.

    auto is dense on a CPU and with dropout, where flex attention has no gradient.
    """
    if attention != "auto":
        return attention
    return DENSE if device == "cpu" or dropout > 0 else FLEX


def branch_masks(
    positions: Tensor,
    offsets: Tensor,
    trunk: int,
    windows: Mapping[str, int | None],
    kernel: str = DENSE,
) -> Mask | dict[str, Mask] | None:
    """Return the mask of the branch columns of (r, c) positions and offsets, if any.

    A (r, 1, m, c) bool for the dense kernel, True = attend; a block mask for flex. One
    for each kind of layer in `windows` if there are several.
    """
    if positions.shape[1] == trunk:
        return None
    make = block_mask if kernel == FLEX else dense_mask
    narrow = {kind: _narrow(window, trunk) for kind, window in windows.items()}
    by_window = {
        window: make(positions, offsets, trunk, window) for window in {*narrow.values()}
    }
    masks = {kind: by_window[window] for kind, window in narrow.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _narrow(window: int | None, columns: int) -> int | None:
    """Return a window, or None if it is at least as wide as the columns."""
    return None if window is None or window >= columns else window


def dense_mask(
    positions: Tensor, offsets: Tensor, trunk: int, window: int | None = None
) -> Tensor:
    """Return a (r, 1, m, c) bool: True = attend."""
    key = torch.arange(positions.shape[1], device=positions.device)
    begin, prefix, first, own = (
        bound[..., None] for bound in _bounds(positions, offsets, trunk, window)
    )
    seen = (begin <= key) & (key < prefix)
    return (seen | ((first <= key) & (key <= own)))[:, None]


def block_mask(
    positions: Tensor, offsets: Tensor, trunk: int, window: int | None = None
) -> BlockMask:
    """Return the same mask for flex attention.

    The bounds of a block's rows tell whether it is needed, and whether it is whole, so
    that memory grows with m c / BLOCK; create_block_mask makes several (m, c) masks.
    """
    begin, prefix, first, own = _bounds(positions, offsets, trunk, window)

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (begin[row, query] <= key) & (key < prefix[row, query])
        return seen | ((first[row, query] <= key) & (key <= own[row, query]))

    r, c = positions.shape
    m = c - trunk
    start = torch.arange(0, c, BLOCK, device=positions.device)
    last = start + BLOCK - 1
    # Rows that pad the last block attend to nothing.
    begin_, prefix_, first_, own_ = (
        F.pad(bound, (0, -m % BLOCK), value=value).view(r, -1, BLOCK, 1)
        for bound, value in ((begin, 1), (prefix, 0), (first, 1), (own, 0))
    )
    clean = (begin_ < prefix_) & (begin_ <= last) & (start < prefix_)
    branch = (first_ <= own_) & (first_ <= last) & (start <= own_)
    needed = (clean | branch).any(2)  # (r, m / BLOCK, c / BLOCK)
    whole = ((begin_ <= start) & (last < prefix_)).all(2)
    return BlockMask.from_kv_blocks(
        *_listed(needed & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=attends,
        seq_lengths=(m, c),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return counts (r, 1, a) and indices (r, 1, a, b) of the True in (r, a, b) bool."""
    places = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], places.int()[:, None]


def _bounds(
    positions: Tensor, offsets: Tensor, trunk: int, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (r, m) beginnings and ends of prefixes, first columns of windows, and own
    columns.
    """
    own = torch.arange(trunk, positions.shape[1], device=positions.device).expand(
        len(positions), -1
    )
    offset, position = offsets[:, trunk:], positions[:, trunk:]
    prefix = position - offset + 1
    if window is None:
        return torch.zeros_like(own), prefix, own - offset + 1, own
    begin = (position - window + 1).clamp(min=0)
    return begin, prefix, own - offset.clamp(max=window) + 1, own


@lru_cache(maxsize=2)  # of training, and of validation
def trunk_mask(rows: int, columns: int, window: int, device: torch.device) -> Tensor:
    """Return the (rows, 1, n, n) bool of a trunk with a sliding window."""
    seen = torch.ones(columns, columns, dtype=torch.bool, device=device)
    return seen.tril().triu(1 - window).expand(rows, 1, -1, -1)


def register(attention: str) -> str:
    """Register the library's `attention` (sdpa, eager) as one that takes branches.

    Returns its name for attn_implementation. The library then passes our mask on, or
    none.
    """
    name = f"branch_{attention}"
    full = _trunk_eager if attention == "eager" else sdpa_attention_forward
    AttentionInterface.register(name, partial(_attention, full_attention=full))
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    return name


# The compiler gets the strides of the slices wrong, and flex is compiled already.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    *,
    full_attention: Callable[..., tuple[Tensor, Any]],
    trunk_keys: TrunkKeys | None = None,
    # Withheld from the trunk's kernel, which would infer packing from them.
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with (r, heads, c, d) queries to (r, kv_heads, c, d) keys; return (r, c,
    heads, d).

    With `trunk_keys` the columns are either the trunk's, whose keys and values are
    stored, or the branches', which attend to the stored ones too.
    """
    if attention_mask is None:
        if trunk_keys is not None:
            trunk_keys[module] = key, value
        output = _trunk_attention(full_attention, module, query, key, value, **kwargs)
        return output, None
    if trunk_keys is not None:
        trunk_key, trunk_value = trunk_keys[module]
        key = torch.cat([trunk_key, key], dim=2)
        value = torch.cat([trunk_value, value], dim=2)
        output = _branch_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            frozen=not trunk_key.requires_grad,
            **kwargs,
        )
        return output.contiguous(), None  # some models take a view of it
    n = query.shape[2] - attention_mask.shape[2]
    own = (states[:, :, :n] for states in (query, key, value))
    trunk = _trunk_attention(full_attention, module, *own, **kwargs)
    branches = _branch_attention(
        module, query[:, :, n:], key, value, attention_mask, **kwargs
    )
    return torch.cat([trunk, branches], dim=1), None


def _trunk_attention(
    full_attention: Callable[..., tuple[Tensor, Any]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    **kwargs: Any,
) -> Tensor:
    """Attend causally, within the layer's window if it is narrower than the trunk."""
    rows, _, n, _ = query.shape
    window = _narrow(layer_window(module), n)
    if window is None:
        output, _ = full_attention(module, query, key, value, None, **kwargs)
    else:
        mask = trunk_mask(rows, n, window, query.device)
        output = _branch_attention(module, query, key, value, mask, **kwargs)
    return output.contiguous()  # some models take a view of it


def _branch_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    frozen: bool = False,
    **unused: Any,
) -> Tensor:
    """Attend under a mask; with `frozen` the trunk's keys and values need no gradient."""
    if isinstance(mask, BlockMask):
        return flex_attention_forward(module, query, key, value, mask, scaling=scaling)[
            0
        ]
    if query.is_cpu and not dropout and mask.ndim == 4:
        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        return window_attention.attend(query, key, value, mask, scaling, frozen=frozen)
    # The kernels that take a mask need a key for every head.
    groups = query.shape[1] // key.shape[1]
    key = repeat_kv(key, groups)
    value = repeat_kv(value, groups)
    kernel = _dense if query.is_cpu else _fused
    return kernel(query, key, value, mask, scaling, dropout)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    """Attend by PyTorch's fused kernel, which stores no scores."""
    output = F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p=dropout, scale=scaling
    )
    return output.transpose(1, 2)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    """Attend in two products: faster than the fused kernel on a CPU with a mask."""
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(
        ~mask, -torch.inf
    )
    scores = torch.softmax((query * scaling) @ key.transpose(2, 3) + bias, dim=-1)
    return (F.dropout(scores, dropout) @ value).transpose(1, 2)


def _trunk_eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    n = query.shape[2]
    causal = torch.ones(n, n, dtype=torch.bool, device=query.device).tril()
    return _branch_attention(module, query, key, value, causal, **kwargs), None
