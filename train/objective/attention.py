"""Attention of a layout's columns: the trunk by a plain causal kernel, the branches by a mask.

The trunk never sees a branch, so only the branch rows need a mask. Shape legend: r rows, n trunk columns,
m branch columns, c = n + m. A branch column of offset j at position t sees the t - j + 1 first
columns of the trunk, the j - 1 columns before it and itself (drawn in train/objective/layout.py).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import is_flash_attn_2_available

from conf import UserError

Mask = Tensor | BlockMask


def branch_mask(positions: Tensor, offsets: Tensor, trunk: int) -> Mask | None:
    """What the branch columns of (r, c) positions and offsets attend to; None without branches.

    On a CPU a dense (r, 1, m, c) bool, True = attend; elsewhere a block mask for flex attention.
    """
    if positions.shape[1] == trunk:
        return None
    return dense_mask(positions, offsets, trunk) if positions.is_cpu else block_mask(positions, offsets, trunk)


def dense_mask(positions: Tensor, offsets: Tensor, trunk: int) -> Tensor:
    """(r, 1, m, c) bool: True = attend."""
    key = torch.arange(positions.shape[1], device=positions.device)
    prefix, first, own = (bound[..., None] for bound in _bounds(positions, offsets, trunk))
    return ((key < prefix) | ((first <= key) & (key <= own)))[:, None]


def block_mask(positions: Tensor, offsets: Tensor, trunk: int) -> BlockMask:
    """The same for flex attention."""
    prefix, first, own = _bounds(positions, offsets, trunk)

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key < prefix[row, query]) | ((first[row, query] <= key) & (key <= own[row, query]))

    r, c = positions.shape
    return create_block_mask(attends, r, None, c - trunk, c, device=str(positions.device))


def _bounds(positions: Tensor, offsets: Tensor, trunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each branch column, (r, m): the end of its prefix, its window's first column, its own column."""
    own = torch.arange(trunk, positions.shape[1], device=positions.device).expand(len(positions), -1)
    offset = offsets[:, trunk:]
    return positions[:, trunk:] - offset + 1, own - offset + 1, own


def register(attention: str) -> str:
    """Make the library's `attention` (sdpa, eager, flash_attention_2) known as one that takes branches.

    Returns its name for attn_implementation. The library hands our mask on, or none.
    Raises UserError for a kernel that is not installed.
    """
    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise UserError("model.attention=flash_attention_2: wanted the package flash-attn, found none")
    # The library takes a name with "flash" in it for one of its kernels.
    name = "branch_" + attention.replace("flash_attention_2", "fa2")
    trunk = {"eager": _eager, "flash_attention_2": _flash, "sdpa": sdpa_attention_forward}[attention]
    AttentionInterface.register(name, partial(_attention, trunk_attention=trunk))
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    return name


@torch.compiler.disable  # its kernels are compiled already; the compiler is wrong about strides of their slices
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    *,
    trunk_attention: Callable[..., tuple[Tensor, Any]],
    position_ids: Tensor | None = None,  # kept from the trunk's kernel, which would look for packing in them
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """(r, heads, c, d) queries over (r, kv_heads, c, d) keys; returns (r, c, heads, d)."""
    if attention_mask is None:
        return trunk_attention(module, query, key, value, None, **kwargs)[0], None
    n = query.shape[2] - attention_mask.shape[2]
    trunk, _ = trunk_attention(module, query[:, :, :n], key[:, :, :n], value[:, :, :n], None, **kwargs)
    if isinstance(attention_mask, BlockMask):
        branches = _flex(module, query[:, :, n:], key, value, attention_mask, **kwargs)
    else:
        branches = _dense(module, query[:, :, n:], key, value, attention_mask, **kwargs)
    return torch.cat([trunk, branches], dim=1), None


def _flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **unused: Any,
) -> tuple[Tensor, None]:
    from flash_attn import flash_attn_func

    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return flash_attn_func(query, key, value, dropout, scaling, causal=True), None


def _flex(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, **kwargs: Any
) -> Tensor:
    if kwargs.get("dropout"):
        raise UserError("objective=branch: wanted no attention dropout on a GPU, found a model with it")
    return flex_attention_forward(module, query, key, value, mask, scaling=kwargs.get("scaling"))[0]


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    n = query.shape[2]
    causal = torch.ones(n, n, dtype=torch.bool, device=query.device).tril()
    return _dense(module, query, key, value, causal, **kwargs), None


def _dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **unused: Any,
) -> Tensor:
    """Attention in two products: on a CPU, with a mask or at small sizes, faster than the fused kernel."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
    scores = torch.softmax((query * scaling) @ key.transpose(2, 3) + bias, dim=-1)
    return (F.dropout(scores, dropout) @ value).transpose(1, 2)
