"""The one loss: a weighted sum of cross-entropies of a linear head, with logits in chunks.

Shape legend: T positions, K of them kept (with a label), d width, V vocabulary. Full float32
logits of a 16,384-token sequence would be 2 GB at V = 32,016: only `chunk` positions have
logits at any time. Since ∂loss/∂logits = weight · (softmax - target) is known as soon as the
logits are, the gradients are made in the forward pass and nothing is computed twice
(as in Liger Kernel, arXiv 2410.10989, §3.2).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from train.objective.layout import IGNORE


def weighted_cross_entropy(
    hidden_Td: Tensor,
    weight_Vd: Tensor,
    labels_T: Tensor,
    weights_T: Tensor,
    *,
    chunk: int,
    teachers_T: Tensor | None = None,
    soft: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss (scalar, with gradient), and per position, without gradient, the
    cross-entropy (T,) with its label and the likeliest token (T,) int64.

    Positions labelled IGNORE cost nothing; their entries are 0 and IGNORE. With `soft` above
    0, a position whose teacher is not -1 learns from (1 - soft) · label + soft · the distribution of
    the position teachers_T names, through which no gradient flows.
    """
    teachers = torch.full_like(labels_T, -1) if teachers_T is None or not soft else teachers_T
    return _LinearCrossEntropy.apply(
        hidden_Td, weight_Vd, labels_T, weights_T, teachers, soft, chunk, torch.is_grad_enabled()
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        teachers: Tensor,
        soft: float,
        chunk: int,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_hidden, of_weight = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        d_hidden = torch.zeros_like(hidden) if of_hidden else None
        # In bfloat16 a sum over chunks would lose what is small beside it.
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=wide) if of_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        losses, predicted = torch.zeros_like(weights), torch.full_like(labels, IGNORE)
        for part in torch.nonzero(labels != IGNORE)[:, 0].split(chunk):
            hidden_cd = hidden[part]
            logits_cV = (hidden_cd @ weight.T).float()
            predicted[part] = logits_cV.argmax(-1)
            taught = torch.nonzero(teachers[part] >= 0)[:, 0]
            targets = torch.softmax((hidden[teachers[part[taught]]] @ weight.T).float(), dim=-1)
            losses[part], learned, d_logits = _chunk(
                logits_cV, labels[part], weights[part], taught, targets, soft
            )
            loss += learned
            d_logits = d_logits.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = d_logits @ weight
            if d_weight is not None:
                if wide == weight.dtype:
                    d_weight.addmm_(d_logits.T, hidden_cd)
                else:
                    d_weight += d_logits.T @ hidden_cd
            del logits_cV, d_logits, targets  # before the next chunk's are made
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight.to(weight.dtype))
        ctx.mark_non_differentiable(losses, predicted)
        return loss, losses, predicted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = (None if saved is None else saved.mul_(d_loss) for saved in ctx.saved_tensors)
        return d_hidden, d_weight, None, None, None, None, None, None


def _chunk(
    logits: Tensor, labels: Tensor, weights: Tensor, taught: Tensor, targets: Tensor, soft: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropies (c,) with the labels, the weighted sum that is learned, and its gradient by
    the (c, V) logits, in their memory. `targets` are the distributions of the `taught` rows.
    """
    log_z = logits.logsumexp(-1)
    losses = log_z - logits.gather(1, labels[:, None])[:, 0]
    softly = log_z[taught] - (targets * logits[taught]).sum(-1)
    learned = losses.index_add(0, taught, softly - losses[taught], alpha=soft)
    by_label = torch.ones_like(losses).index_fill_(0, taught, 1 - soft)
    gradient = logits.sub_(log_z[:, None]).exp_()
    gradient.scatter_add_(1, labels[:, None], -by_label[:, None])
    gradient.index_add_(0, taught, targets, alpha=-soft)
    return losses, (learned * weights).sum(), gradient.mul_(weights[:, None])
