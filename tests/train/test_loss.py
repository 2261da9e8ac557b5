import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from train.loss import DraftLoss, draft_loss, place_weights, summarise, tally
from train.objective import IGNORE


def reference(hidden, head, labels, weights, offsets, teachers, draft):
    """All logits at once and one position after the other, by autograd."""
    logits = (hidden @ head.T).float()
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE)
    learned, agreed = [], []
    for z, label, cost, teacher in zip(
        logits, labels.tolist(), losses, teachers.tolist(), strict=True
    ):
        agreed.append(torch.exp(-cost))
        if teacher < 0 or label == IGNORE or not draft.taught:
            learned.append(cost)
            continue
        p, q = logits[teacher].detach().softmax(-1), z.softmax(-1)
        alpha = torch.minimum(p, q).sum()
        if draft.kind == "ce":
            learned.append(
                (1 - draft.soft) * cost - draft.soft * (p * z.log_softmax(-1)).sum()
            )
            continue
        share = torch.exp(-3 * alpha.detach()) if draft.kind == "lk" else 0.0
        divergence = (p * (p.log() - z.log_softmax(-1))).sum()
        learned.append(share * divergence + (1 - share) * (1 - alpha))
        agreed[-1] = alpha
    if draft.by_place:
        weights = weights * by_window(
            [float(a.detach()) for a in agreed], offsets.tolist()
        )
    return (torch.stack(learned) * weights).sum(), losses, logits.argmax(-1)


def by_window(agreed: list[float], offsets: list[int]) -> Tensor:
    """w_j = Σ_{m ≥ j} Π_{i ≤ m} ã_i, window by window."""
    weights = [1.0] * len(offsets)
    for start in (i for i, offset in enumerate(offsets) if offset == 1):
        end = next(
            (i for i in range(start + 1, len(offsets)) if offsets[i] <= 1), len(offsets)
        )
        smoothed = [0.5 + 0.5 * a for a in agreed[start:end]]
        for j in range(end - start):
            weights[start + j] = sum(
                math.prod(smoothed[: m + 1]) for m in range(j, end - start)
            )
    return torch.tensor(weights)


DRAFTS = [
    DraftLoss(kind, soft, by_place)
    for kind, soft in [("ce", 0.0), ("ce", 0.3), ("ce", 1.0), ("lk", 0.0)]
    for by_place in (False, True)
]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.integers(1, 31),
    st.sampled_from(DRAFTS),
    st.integers(0, 10**6),
)
def test_chunks_are_the_plain_loss(
    windows: list[int], chunk: int, draft: DraftLoss, seed: int
) -> None:
    """Value and gradients, in float64 outside and float32 inside, as in training.

    The rows are windows of these widths; 0 is a standard token.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor(
        [j for width in windows for j in (range(1, width + 1) if width else [0])]
    )
    T = len(offsets)
    hidden = torch.randn(
        T, 8, dtype=torch.float64, generator=generator, requires_grad=True
    )
    head = torch.randn(
        11, 8, dtype=torch.float64, generator=generator, requires_grad=True
    )
    labels = torch.randint(0, 11, (T,), generator=generator)
    labels[(torch.rand(T, generator=generator) < 0.3) & (offsets == 0)] = IGNORE
    weights = torch.rand(T, generator=generator)
    # Any other row teaches: at p = q the gradient of total variation is not unique.
    others = (
        torch.arange(T) + torch.randint(1, max(T, 2), (T,), generator=generator)
    ) % T
    teachers = torch.where((offsets > 0) & (T > 1), others, -1)
    expected, losses, likeliest = reference(
        hidden, head, labels, weights, offsets, teachers, draft
    )
    loss, entropies, predicted = draft_loss(
        hidden,
        head,
        labels,
        weights,
        chunk=chunk,
        offsets_T=offsets,
        teachers_T=teachers,
        draft=draft,
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropies, losses, rtol=1e-5, atol=1e-6)
    labelled = labels != IGNORE
    assert (
        torch.equal(predicted[labelled], likeliest[labelled])
        and (predicted[~labelled] == IGNORE).all()
    )
    ours = torch.autograd.grad(loss * 3, [hidden, head])
    theirs = torch.autograd.grad(expected * 3, [hidden, head])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-6)


def test_place_weights_of_a_window_by_hand() -> None:
    """Chances 1, 0, 1 are smoothed to 1, ½, 1: products 1, ½, ½, and their sums from
    each place on.
    """
    weights = place_weights(
        torch.tensor([1.0, 0.0, 1.0, 0.3, 1.0]), torch.tensor([1, 2, 3, 0, 1])
    )
    assert weights.tolist() == [2.0, 1.0, 0.5, 1.0, 1.0]


def test_nothing_to_predict_still_has_a_gradient() -> None:
    """A rank whose micro-batch has no masked position must take part in the backward
    pass.
    """
    hidden = torch.randn(4, 8, requires_grad=True)
    head = torch.randn(11, 8, requires_grad=True)
    loss, *_ = draft_loss(
        hidden, head, torch.full((4,), IGNORE), torch.ones(4), chunk=2
    )
    loss.backward()
    assert loss.item() == 0 and hidden.grad is not None and not hidden.grad.any()
    assert head.grad is not None and not head.grad.any()


def test_a_frozen_head_and_evaluation_make_no_gradients() -> None:
    hidden, head = torch.randn(4, 8, requires_grad=True), torch.randn(11, 8)
    labels = torch.tensor([1, 2, 3, 4])
    loss, *_ = draft_loss(hidden, head, labels, torch.ones(4), chunk=3)
    loss.backward()
    assert hidden.grad is not None and hidden.grad.any()
    with torch.no_grad():
        again, *_ = draft_loss(hidden, head, labels, torch.ones(4), chunk=3)
    assert again.item() == loss.item() and not again.requires_grad


def test_tally_sums_by_offset() -> None:
    labels = torch.tensor([[5, 5, IGNORE, 5, 5]])
    offsets = torch.tensor([[0, 1, 1, 2, 3]])
    losses = torch.tensor([[1.0, 2.0, 0.0, 4.0, 8.0]])
    predicted = torch.tensor([[5, 6, IGNORE, 5, 5]])
    result = tally(losses, predicted, labels, offsets, L=2)
    assert result.tolist() == [
        [1, 1, 1, 1],
        [1, 2, 0, 0],
        [1, 4, 1, 1],
    ]  # offset 3 is beyond L


def test_a_draft_is_accepted_with_all_before_it() -> None:
    """Windows of width 3 (hit, miss, hit), 2 (hit, hit) and 1 (miss): E = 2/3 + 1/2 +
    0.
    """
    offsets = torch.tensor([[0, 1, 2, 3, 1, 2, 1]])
    labels = torch.tensor([[1, 1, 1, 1, 1, 1, 1]])
    predicted = torch.tensor([[0, 1, 0, 1, 1, 1, 0]])
    result = tally(torch.zeros(1, 7), predicted, labels, offsets, L=3)
    assert result[:, 3].tolist() == [0, 2, 1, 0]
    assert summarise(result)["accepted"] == pytest.approx(2 / 3 + 1 / 2)
    assert summarise(result)["accuracy_2"] == pytest.approx(1 / 2)


def test_the_heads_gradient_is_summed_over_chunks_in_float32() -> None:
    """It was summed in the head's own type: over many chunks what is small was lost
    beside the sum.
    """
    torch.manual_seed(0)
    hidden = torch.ones(2048, 8).bfloat16().requires_grad_()
    head = torch.zeros(4, 8).bfloat16().requires_grad_()
    labels, weights = torch.zeros(2048, dtype=torch.long), torch.full((2048,), 1 / 2048)
    loss, *_ = draft_loss(hidden, head, labels, weights, chunk=1)
    gradient = torch.autograd.grad(loss, head)[0].float()
    torch.testing.assert_close(gradient[0], torch.full((8,), -0.75))
    torch.testing.assert_close(gradient[1:], torch.full((3, 8), 0.25))
