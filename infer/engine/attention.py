"""Tree attention for Transformers' models, registered under a name of its own.

The runner hands a (B, 1, q, kv) boolean mask through the library's model (True = attend);
without one, the rows are a prompt and attention is causal. A model with ALiBi keeps the library's
attention under that name (alibi.py).
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from infer.engine.alibi import is_alibi

NAME = "tree"
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
    """(B, heads, q, d) queries over (B, kv_heads, kv, d) keys; returns (B, q, heads, d).

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
    """(1, 1, n, n) bool: each row attends to itself and to the `window` - 1 rows before it."""
    rows = torch.ones(n, n, dtype=torch.bool, device=device)
    return (rows.tril() & rows.triu(1 - window))[None, None]


def register() -> None:
    """Make `attn_implementation="tree"` known to Transformers."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, own_mask)


def own_mask(*args: Any, config: PretrainedConfig, **others: Any) -> Tensor | None:
    """The library's own for rows without a mask, where its own attention takes them; elsewhere a mask
    comes from the runner or not at all.
    """
    return eager_mask(*args, **others) if is_alibi(config) else None
