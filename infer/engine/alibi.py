"""ALiBi (arXiv 2108.12409), as BLOOM has it: no position embeddings, but slope x key position added to
each score, with a slope for each head.

    B sequences, q rows each, n columns of cache in use, H heads

The library takes a key's position from its column, or from a mask of padding. In a tree rivals lie in
columns side by side and share a position. So a tree's mask has the bias in it, by head, and the
library adds nothing to it; all else, its attention too, is the library's.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor


def is_alibi(config: PretrainedConfig) -> bool:
    """Whether masks of this architecture have the bias in them. They are additive then: it has an attention
    of its own, which takes no other.
    """
    return config.model_type == "bloom"


def leave_to_masks(decoder: Any) -> Tensor:
    """From now on the decoder adds no bias to a 4-D mask. Returns its (H,) slopes, in float32."""
    decoder.build_alibi_tensor = _beside
    two_places = torch.ones(1, 2, device=decoder.device)
    return build_alibi_tensor(two_places, decoder.num_heads, torch.float32)[:, 0, 1]


def _beside(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """What the decoder adds to the scores beside a mask: nothing, or the library's own (B * H, 1, n)
    where the mask is one of padding.
    """
    if attention_mask.ndim == 4:
        return torch.zeros(1, 1, 1, dtype=dtype, device=attention_mask.device)
    return build_alibi_tensor(attention_mask, num_heads, dtype)


def biased(attends: Tensor, places: Tensor, slopes: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, H, q, n) in `dtype`: slope x key position where a row attends, and -inf elsewhere.

    `attends` (B, 1, q, n) bool; `places` (B, n) positions of the tokens that the columns hold. The
    position is absolute, and rounded in narrow types, as the library's is and as in BLOOM's training.
    """
    bias = (slopes[:, None, None] * places[:, None, None]).to(dtype)
    return torch.where(attends, bias, float("-inf"))
