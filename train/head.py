"""The previous-token head: correct each draft by the token drafted before it.

An adaptive token predicts a token without knowing the tokens between it and the text. When
drafts are chosen one after the other, the previous token is known. Let h_j be the last
hidden state of the j-th adaptive token, and e(t_{j-1}) the model's embedding of the token
before the one that it predicts. The head computes (Apple's sampler head, arXiv 2507.11851)

    h'_j = h_j + W2 silu( W1 [ĥ_j ; ê(t_{j-1})] )        x̂ = x / rms(x)

and the model's output head turns h'_j into logits. W2 is zero at the start. The inputs are
normalized, because the scales of embeddings and hidden states differ from model to model.
infer/engine/head.py computes the same in decoding.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.adapter import HEAD
from train.tensor_files import write_safetensors

PREFIX = "head."  # of the head's parameter names in train.model.AdaptiveLM


class PreviousTokenHead(nn.Module):
    """The head's weights: W1 (d, 2d), random at the start, and W2 (d, d), zero at the start."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1 = nn.Linear(2 * width, width, bias=False, dtype=dtype)
        self.w2 = nn.Linear(width, width, bias=False, dtype=dtype)
        nn.init.zeros_(self.w2.weight)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Return h' (..., d) for hidden states and previous tokens' embeddings, both (..., d)."""
        width = hidden.shape[-1:]
        inputs = [F.rms_norm(hidden, width), F.rms_norm(previous, width)]
        corrected: Tensor = hidden + self.w2(F.silu(self.w1(torch.cat(inputs, -1))))
        return corrected


def write_head(weights: Mapping[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    """Write the head of a checkpoint's weights into an adapter's folder, if it has one."""
    head = {
        name.removeprefix(PREFIX): weights[name].to(dtype)
        for name in weights
        if name.startswith(PREFIX)
    }
    if head:
        write_safetensors(head, folder / HEAD)
