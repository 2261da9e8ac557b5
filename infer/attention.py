"""Tree attention for Transformers' models, registered under a name of its own.

The runner hands a (1, 1, q, kv) boolean mask through the library's model (True = attend);
without one, the rows are a prompt and attention is causal.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "tree"


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """(1, heads, q, d) queries over (1, kv_heads, kv, d) keys; returns (1, q, heads, d).

    Grouped queries are folded into rows of their key's head, so that no key is copied.
    """
    heads, q, d = query.shape[1:]
    kv_heads = key.shape[1]
    if attention_mask is None:
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=q > 1, scale=scaling, enable_gqa=heads != kv_heads
        )
        return output.transpose(1, 2), None
    groups = heads // kv_heads
    if groups > 1:
        query = query.reshape(1, kv_heads, groups * q, d)
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(1, heads, q, d).transpose(1, 2), None


def register() -> None:
    """Make `attn_implementation="tree"` known to Transformers."""
    AttentionInterface.register(NAME, tree_attention)
    # A mask comes from the runner or not at all: the library need not build one.
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
