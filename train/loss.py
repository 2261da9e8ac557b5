"""The one loss: a weighted sum of cross-entropies, with logits in chunks.

Shape legend: T positions, d width, V vocabulary. Full float32 logits of a 16,384-token
sequence would be 2 GB at V = 32,016: only `chunk` positions have logits at any time, and
the backward pass computes them again.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from train.layout import IGNORE


def weighted_cross_entropy(
    hidden_Td: Tensor,
    head: Callable[[Tensor], Tensor],
    labels_T: Tensor,
    weights_T: Tensor,
    *,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss (scalar, with gradient), and per position, without gradient, the
    cross-entropy (T,) and whether the label was the likeliest token (T,) bool.

    Positions labelled IGNORE cost nothing; their entries are 0 and False.
    """
    kept = torch.nonzero(labels_T != IGNORE)[:, 0]
    losses = torch.zeros_like(weights_T)
    correct = torch.zeros_like(labels_T, dtype=torch.bool)
    # Keeps the graph whole when nothing is predicted: every rank must take part in the backward pass.
    loss = hidden_Td.sum() * 0.0
    for part in kept.split(chunk):
        arguments = (head, hidden_Td[part], labels_T[part])
        if len(kept) > chunk and torch.is_grad_enabled():
            losses_c, correct_c = checkpoint(_cross_entropy, *arguments, use_reentrant=False)
        else:
            losses_c, correct_c = _cross_entropy(*arguments)
        loss = loss + (losses_c * weights_T[part]).sum()
        losses[part] = losses_c.detach()
        correct[part] = correct_c
    return loss, losses, correct


def _cross_entropy(
    head: Callable[[Tensor], Tensor], hidden_cd: Tensor, labels_c: Tensor
) -> tuple[Tensor, Tensor]:
    logits_cV = head(hidden_cd).float()
    return F.cross_entropy(logits_cV, labels_c, reduction="none"), logits_cV.argmax(-1) == labels_c
