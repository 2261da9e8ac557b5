"""Compute attention for the columns of a layout.

The trunk uses a plain causal kernel. It never attends to a branch, so only the branch
columns need a mask. Shape legend: r rows, n trunk columns, m branch columns, c = n + m.
A branch column of offset j at position t attends to the first t - j + 1 columns of the
trunk, to the j - 1 branch columns before it, and to itself (drawn in train/objective.py).
In a layer with a sliding window of W, branch and trunk columns attend only to positions
above t - W:

    W = 3                trunk 0 1 2 3 4    branch 3 4 5
    position 3, j = 1          · 1 1 · ·           1 · ·
    position 4, j = 2          · · 1 · ·           1 1 ·
    position 5, j = 3          · · · · ·           1 1 1
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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

BLOCK = 128  # rows and columns of a block in flex attention's mask
FLEX = "flex"
DENSE = "dense"


@dataclass(eq=False, slots=True)
class TrunkKeys:
    """The (r, kv_heads, n, d) keys and values of a trunk, by layer.

    Not a plain dict: torch.compile would compare each layer with the keys of a dict that passes
    through it, and compile all layers separately.
    """

    by_layer: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)


def branch_kernel(attention: str, device: str, *, dropout: float) -> str:
    """Return the kernel of the branches, "flex" or "dense", for objective.attention.

    "auto" selects dense on a CPU and with dropout, where flex attention has no gradient.
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
    """Return the mask of the branch columns, or None if the layout has no branches.

    `positions` and `offsets` are (r, c). The mask is a (r, 1, m, c) bool tensor for the
    dense kernel, True = attend, and a block mask for flex. `windows` gives the attention
    window of each layer type. If the types need different masks, the result is a dict of
    masks by layer type.
    """
    if positions.shape[1] == trunk:
        return None
    make = block_mask if kernel == FLEX else dense_mask
    narrow = {kind: _effective(window, trunk) for kind, window in windows.items()}
    by_window = {
        window: make(positions, offsets, trunk, window) for window in {*narrow.values()}
    }
    masks = {kind: by_window[window] for kind, window in narrow.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _effective(window: int | None, columns: int) -> int | None:
    """Return the window, or None if it covers all columns and has no effect."""
    return None if window is None or window >= columns else window


def dense_mask(
    positions: Tensor, offsets: Tensor, trunk: int, window: int | None = None
) -> Tensor:
    """Return the mask of the branch columns as a (r, 1, m, c) bool tensor, True = attend."""
    key = torch.arange(positions.shape[1], device=positions.device)
    begin, prefix, first, column = (
        bound[..., None] for bound in _bounds(positions, offsets, trunk, window)
    )
    seen = (begin <= key) & (key < prefix)
    return (seen | ((first <= key) & (key <= column)))[:, None]


def block_mask(
    positions: Tensor, offsets: Tensor, trunk: int, window: int | None = None
) -> BlockMask:
    """Return the mask of `dense_mask` as a block mask for flex attention.

    The bounds of the rows in a block decide whether the block has any pair that attends,
    and whether all pairs do. So memory grows with m c / BLOCK, while create_block_mask
    allocates several (m, c) masks.
    """
    begin, prefix, first, column = _bounds(positions, offsets, trunk, window)

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (begin[row, query] <= key) & (key < prefix[row, query])
        return seen | ((first[row, query] <= key) & (key <= column[row, query]))

    r, c = positions.shape
    m = c - trunk
    start = torch.arange(0, c, BLOCK, device=positions.device)
    last = start + BLOCK - 1
    # Rows that pad the last block attend to nothing.
    begin_, prefix_, first_, own_ = (
        F.pad(bound, (0, -m % BLOCK), value=value).view(r, -1, BLOCK, 1)
        for bound, value in ((begin, 1), (prefix, 0), (first, 1), (column, 0))
    )
    clean = (begin_ < prefix_) & (begin_ <= last) & (start < prefix_)
    branch = (first_ <= own_) & (first_ <= last) & (start <= own_)
    needed = (clean | branch).any(2)  # (r, m / BLOCK, c / BLOCK)
    whole = ((begin_ <= start) & (last < prefix_)).all(2)
    return BlockMask.from_kv_blocks(
        *_block_lists(needed & ~whole),
        *_block_lists(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=attends,
        seq_lengths=(m, c),
    )


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the counts (r, 1, a) and indices (r, 1, a, b) of True in a (r, a, b) bool tensor.

    The indices of True come first, then the indices of False.
    """
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], indices.int()[:, None]


def _bounds(
    positions: Tensor, offsets: Tensor, trunk: int, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the bounds of the columns that each branch column attends to, as (r, m) tensors.

    They are the first and the end column of its trunk prefix, the first column of its
    branch, and its own column.
    """
    column = torch.arange(trunk, positions.shape[1], device=positions.device).expand(
        len(positions), -1
    )
    offset, position = offsets[:, trunk:], positions[:, trunk:]
    prefix = position - offset + 1
    if window is None:
        return torch.zeros_like(column), prefix, column - offset + 1, column
    begin = (position - window + 1).clamp(min=0)
    return begin, prefix, column - offset.clamp(max=window) + 1, column


@lru_cache(maxsize=2)  # one for training, one for validation
def trunk_mask(rows: int, columns: int, window: int, device: torch.device) -> Tensor:
    """Return the (rows, 1, n, n) bool mask of a trunk with a sliding window, True = attend."""
    seen = torch.ones(columns, columns, dtype=torch.bool, device=device)
    return seen.tril().triu(1 - window).expand(rows, 1, -1, -1)


def register(attention: str) -> str:
    """Register an attention function for layouts with branches; return its name.

    `attention` is Transformers' function for the trunk, sdpa or eager. The name is for
    attn_implementation. Transformers then builds no mask of its own and passes on the
    mask that the caller gives.
    """
    name = f"branch_{attention}"
    full = _trunk_eager if attention == "eager" else sdpa_attention_forward
    AttentionInterface.register(name, partial(_attention, full_attention=full))
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    return name


# torch.compile gets the strides of the slices wrong, and flex attention is already compiled.
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
    # Not passed to the trunk's kernel, which would infer packed sequences from them.
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention output (r, c, heads, d) and no weights.

    `query` is (r, heads, c, d), `key` and `value` are (r, kv_heads, c, d). With
    `trunk_keys` the columns belong to one part of the layout. A call without a mask
    computes the trunk and stores its keys and values in `trunk_keys`. A call with a mask
    computes the branches, which also attend to the stored keys.
    """
    if attention_mask is None:
        if trunk_keys is not None:
            trunk_keys.by_layer[module] = key, value
        output = _trunk_attention(full_attention, module, query, key, value, **kwargs)
        return output, None
    if trunk_keys is not None:
        trunk_key, trunk_value = trunk_keys.by_layer[module]
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
        return output.contiguous(), None  # some models call view on it
    n = query.shape[2] - attention_mask.shape[2]
    trunk_states = (states[:, :, :n] for states in (query, key, value))
    trunk = _trunk_attention(full_attention, module, *trunk_states, **kwargs)
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
    """Return causal attention (r, n, heads, d), limited to the layer's window if it has one."""
    rows, _, n, _ = query.shape
    window = _effective(layer_window(module), n)
    if window is None:
        output, _ = full_attention(module, query, key, value, None, **kwargs)
    else:
        mask = trunk_mask(rows, n, window, query.device)
        output = _branch_attention(module, query, key, value, mask, **kwargs)
    return output.contiguous()  # some models call view on it


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
    """Return attention (r, m, heads, d) under a mask.

    With `frozen` no gradient is computed for the trunk's keys and values.
    """
    if isinstance(mask, BlockMask):
        return flex_attention_forward(module, query, key, value, mask, scaling=scaling)[
            0
        ]
    if query.is_cpu and not dropout and mask.ndim == 4:
        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        return window_attention.attend(query, key, value, mask, scaling, frozen=frozen)
    # The kernels with a mask need one key head for each query head.
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
    """Return attention by PyTorch's fused kernel, which does not store the scores."""
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
    """Return attention by two matrix products, faster on a CPU with a mask than the fused kernel."""
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
