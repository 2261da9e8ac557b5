"""Compute the training loss of all objectives: a weighted sum over positions, logits in chunks.

Shape legend: T positions, c positions in a chunk, d width, V vocabulary. Full float32
logits of a 16,384-token sequence would take 2 GB at V = 32,016, so only `chunk` positions
have logits at any time. ∂loss/∂logits is known as soon as the logits are, so the forward
pass computes the gradients, without recomputation (as in Liger Kernel, arXiv 2410.10989,
§3.2).

The loss of a standard token is its cross-entropy. The loss of an adaptive token is

    -(1 - soft) log q(label) - soft Σ p log q         ∂/∂z = q - target

where z are its logits, q = softmax(z), and p is its teacher: the model's own distribution
at the position that predicts the same token from the clean prefix. p has no gradient.

The previous-token head turns the hidden state of an adaptive token into a corrected state.
Its loss is the same, but only over the CANDIDATES likeliest tokens of the uncorrected
state, because decoding chooses among them: -Σ_c target(c) log q(c).
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from train.objective import IGNORE

CANDIDATES = 16  # must equal infer.engine.head.CORRECTED


def draft_loss(
    hidden_Td: Tensor,
    weight_Vd: Tensor,
    labels_T: Tensor,
    weights_T: Tensor,
    *,
    chunk: int,
    teachers_T: Tensor | None = None,
    soft: float = 0.0,
    corrected_Td: Tensor | None = None,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, and each position's cross-entropy (T,) and likeliest token (T,).

    Only the loss, a scalar, has a gradient. Positions labelled IGNORE do not count; their
    entries are 0 and IGNORE. `teachers_T` has the position of each token's teacher; a token
    with -1 has no teacher and learns from its label only. If the corrected states
    `corrected_Td` are given, their loss is half of the result, they decide the likeliest
    token, and `weight_Vd` must not require a gradient.
    """
    assert corrected_Td is None or not weight_Vd.requires_grad
    absent = torch.full_like(labels_T, -1)
    teachers = teachers_T if teachers_T is not None and soft else absent
    grad = torch.is_grad_enabled()
    apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = _DraftLoss.apply
    return apply(
        hidden_Td,
        corrected_Td,
        weight_Vd,
        bias_V,
        labels_T,
        weights_T,
        teachers,
        soft,
        chunk,
        grad,
    )


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        corrected: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor,
        teachers: Tensor,
        soft: float,
        chunk: int,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        need_hidden, need_corrected, need_weight, need_bias = (
            grad_enabled and needed for needed in ctx.needs_input_grad[:4]
        )
        d_hidden = torch.zeros_like(hidden) if need_hidden else None
        d_corrected = torch.zeros_like(hidden) if need_corrected else None
        # In bfloat16 a sum over chunks would lose small terms.
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        d_bias = torch.zeros_like(weight[:, 0], dtype=wide) if need_bias else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        losses = torch.zeros_like(weights)
        predicted = torch.full_like(labels, IGNORE)
        if corrected is not None:
            weights = weights / 2
        for part in _parts(labels, teachers, chunk):
            hidden_cd = hidden[part]
            logits_cV = F.linear(hidden_cd, weight, bias).float()
            weights_c = weights[part]
            p_cV = _teacher_distributions(hidden, weight, bias, teachers[part])
            if corrected is None:
                best = logits_cV.argmax(-1, keepdim=True)
                predicted[part] = best[:, 0]
            else:
                ids_cn = _likeliest(logits_cV, min(CANDIDATES, len(weight)))
                rows_cnd = weight[ids_cn]
                scores = (rows_cnd @ corrected[part][..., None])[..., 0].float()
                if bias is not None:
                    scores += bias[ids_cn]
                best = scores.argmax(-1, keepdim=True)
                predicted[part] = ids_cn.gather(1, best)[:, 0]
                losses_c = _candidate_losses(scores, ids_cn, labels[part], p_cV, soft)
                loss += (losses_c * weights_c).sum()
                if d_corrected is not None:
                    d_scores = scores.mul_(weights_c[:, None]).to(hidden.dtype)
                    d_corrected[part] = (d_scores[:, None] @ rows_cnd)[:, 0]
                best = ids_cn[:, :1]
            losses[part], losses_c, d_logits = _chunk_losses(
                logits_cV, best, labels[part], p_cV, soft
            )
            loss += (losses_c * weights_c).sum()
            del logits_cV, p_cV  # free them before the next chunk allocates
            d_logits = d_logits.to(hidden.dtype)
            factors = weights_c[:, None].to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = (d_logits @ weight).mul_(factors)
            if d_weight is not None:
                weighted = hidden_cd * factors
                if wide == weight.dtype:
                    d_weight.addmm_(d_logits.T, weighted)
                else:
                    d_weight += d_logits.T @ weighted
            if d_bias is not None:
                d_bias += d_logits.T.to(wide) @ weights_c.to(wide)
            del d_logits
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(weight.dtype)
        ctx.save_for_backward(d_hidden, d_corrected, d_weight, d_bias)
        ctx.mark_non_differentiable(losses, predicted)
        return loss, losses, predicted

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_loss: Tensor, *unused: Tensor
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return *(None if d is None else d.mul_(d_loss) for d in saved), *[None] * 6


def _parts(labels: Tensor, teachers: Tensor, chunk: int) -> Iterator[Tensor]:
    """Yield up to `chunk` labelled positions at a time, either all with a teacher or all without."""
    labelled = labels != IGNORE
    taught = labelled & (teachers >= 0)
    students = torch.nonzero(taught)[:, 0]
    # Positions of one teacher follow each other, so that a chunk has few teachers.
    students = students[teachers[students].argsort(stable=True)]
    kinds = [torch.nonzero(labelled & ~taught)[:, 0], students]
    parts = chain.from_iterable(positions.split(chunk) for positions in kinds)
    return (part for part in parts if len(part))


def _teacher_distributions(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, teachers: Tensor
) -> Tensor | None:
    """Return the (c, V) distributions at the positions `teachers` (c,); None if they are -1."""
    if teachers[0] < 0:
        return None
    distinct, inverse = teachers.unique(return_inverse=True)
    logits = F.linear(hidden[distinct], weight, bias).float()
    return torch.softmax(logits, dim=-1)[inverse]


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """Return the (c, count) ids of the largest logits in each row of (c, V), largest first."""
    return logits.topk(count).indices


def _candidate_losses(
    scores: Tensor, ids: Tensor, labels: Tensor, p: Tensor | None, soft: float
) -> Tensor:
    """Return the (c,) losses over the candidates `ids` (c, n); overwrite `scores` with gradients.

    `scores` (c, n) are the candidates' logits. The target's probability of other tokens
    does not count.
    """
    target = (ids == labels[:, None]).float()
    if p is not None:
        target.lerp_(p.gather(1, ids), soft)
    mass = target.sum(-1)
    log_z = scores.logsumexp(-1)
    losses = mass * log_z - (target * scores).sum(-1)
    scores.sub_(log_z[:, None]).exp_().mul_(mass[:, None]).sub_(target)
    return losses


def _chunk_losses(
    logits: Tensor, best: Tensor, labels: Tensor, p: Tensor | None, soft: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross-entropies with the labels (c,), training losses (c,), and gradients (c, V).

    The gradients are d(training losses)/d(logits), with `logits` (c, V). `best` (c, 1) has
    the likeliest tokens, `p` (c, V) the teachers' distributions. A pass over all logits costs
    a tenth of the product that computes them, so the code makes few passes.
    """
    q = torch.softmax(logits, dim=-1)
    log_z = (logits.gather(1, best) - q.gather(1, best).log())[:, 0]
    losses = log_z - logits.gather(1, labels[:, None])[:, 0]
    if p is None:
        soft = 0.0
    soft_losses = (
        0.0 if p is None else log_z - (p[:, None] @ logits[..., None])[:, 0, 0]
    )
    d_label = torch.full_like(labels, soft - 1, dtype=q.dtype)
    q.scatter_add_(1, labels[:, None], d_label[:, None])
    if p is not None:
        q.sub_(p, alpha=soft)
    return losses, (1 - soft) * losses + soft * soft_losses, q


def tally(
    losses: Tensor, predicted: Tensor, labels: Tensor, offsets: Tensor, *, L: int
) -> Tensor:
    """Return sums by offset, (L + 1, 4) float64, of the (r, c) columns with offsets up to L.

    A row sums over the columns of one offset: their number, their cross-entropy, the
    correct ones, and the ones that are correct with all earlier offsets of their window.
    """
    correct = predicted == labels
    # Count the errors from the first column of the window to each column. The columns of a
    # window are adjacent.
    missed = torch.cumsum(~correct, dim=1)
    column = torch.arange(labels.shape[1], device=labels.device)
    before = torch.where(offsets > 0, column - offsets, column)
    missed = missed - torch.where(before >= 0, missed.gather(1, before.clamp(min=0)), 0)
    accepted = correct & (missed == 0)
    valid = (labels != IGNORE) & (offsets <= L)
    rows = torch.stack(
        [valid.double(), losses.double(), correct.double(), accepted.double()], dim=-1
    )[valid]
    sums = torch.zeros(L + 1, 4, dtype=torch.float64, device=rows.device)
    return sums.index_add_(0, offsets[valid], rows)


def summarise(tally: Tensor) -> dict[str, float]:
    """Return the metrics of a (L + 1, 4) tally by name.

    They are standard_loss, accuracy_j for each offset j, masked_loss, masked (the number of
    adaptive tokens) and accepted. standard_loss and accuracy_0 are absent without standard
    tokens (a gated adapter). `accepted` is the expected number of accepted drafts,
    Σ_j P(a_1..a_j all correct). Greedy decoding with L adaptive tokens accepts this many per
    step if the text is the model's own.
    """
    (count, loss, correct, _), *drafts = tally.tolist()
    metrics = (
        {"standard_loss": loss / count, "accuracy_0": correct / count} if count else {}
    )
    if masked := sum(row[0] for row in drafts):
        metrics["masked_loss"] = sum(row[1] for row in drafts) / masked
        metrics["masked"] = masked
        metrics["accepted"] = sum(row[3] / max(row[0], 1) for row in drafts)
        for offset, (count, _, correct, _) in enumerate(drafts, start=1):
            metrics[f"accuracy_{offset}"] = correct / max(count, 1)
    return metrics
