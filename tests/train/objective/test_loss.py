import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from train.monitor.metrics import summarise, tally
from train.objective.layout import IGNORE
from train.objective.loss import weighted_cross_entropy


def reference(hidden, head, labels, weights, teachers, soft):
    """All logits at once, by autograd: (1 - soft) of the label and soft of the teacher's distribution."""
    logits = (hidden @ head.T).float()
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE)
    distribution = logits.detach().softmax(-1)[teachers.clamp(min=0)]
    softly = F.cross_entropy(logits, distribution, reduction="none")
    learned = torch.where((teachers >= 0) & (labels != IGNORE), (1 - soft) * losses + soft * softly, losses)
    return (learned * weights).sum(), losses, logits.argmax(-1)


@given(st.integers(1, 30), st.integers(1, 31), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 10**6))
def test_chunks_and_soft_targets_are_the_plain_loss(T: int, chunk: int, soft: float, seed: int) -> None:
    """Value and gradients, in float64 outside and float32 inside, as in training."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    head = torch.randn(11, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.randint(0, 11, (T,), generator=generator)
    labels[torch.rand(T, generator=generator) < 0.3] = IGNORE
    weights = torch.rand(T, generator=generator)
    teachers = torch.randint(-1, T, (T,), generator=generator)
    wanted, losses, likeliest = reference(hidden, head, labels, weights, teachers, soft)
    loss, found, predicted = weighted_cross_entropy(
        hidden, head, labels, weights, chunk=chunk, teachers_T=teachers, soft=soft
    )
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    kept = labels != IGNORE
    assert torch.equal(predicted[kept], likeliest[kept]) and (predicted[~kept] == IGNORE).all()
    ours = torch.autograd.grad(loss * 3, [hidden, head])
    theirs = torch.autograd.grad(wanted * 3, [hidden, head])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_nothing_to_predict_still_has_a_gradient() -> None:
    """A rank whose micro-batch has no masked position must take part in the backward pass."""
    hidden = torch.randn(4, 8, requires_grad=True)
    head = torch.randn(11, 8, requires_grad=True)
    loss, *_ = weighted_cross_entropy(hidden, head, torch.full((4,), IGNORE), torch.ones(4), chunk=2)
    loss.backward()
    assert loss.item() == 0 and hidden.grad is not None and not hidden.grad.any()
    assert head.grad is not None and not head.grad.any()


def test_a_frozen_head_and_evaluation_make_no_gradients() -> None:
    hidden, head = torch.randn(4, 8, requires_grad=True), torch.randn(11, 8)
    labels = torch.tensor([1, 2, 3, 4])
    loss, *_ = weighted_cross_entropy(hidden, head, labels, torch.ones(4), chunk=3)
    loss.backward()
    assert hidden.grad is not None and hidden.grad.any()
    with torch.no_grad():
        again, *_ = weighted_cross_entropy(hidden, head, labels, torch.ones(4), chunk=3)
    assert again.item() == loss.item() and not again.requires_grad


def test_tally_sums_by_offset() -> None:
    labels = torch.tensor([[5, 5, IGNORE, 5, 5]])
    offsets = torch.tensor([[0, 1, 1, 2, 3]])
    losses = torch.tensor([[1.0, 2.0, 0.0, 4.0, 8.0]])
    predicted = torch.tensor([[5, 6, IGNORE, 5, 5]])
    found = tally(losses, predicted, labels, offsets, L=2)
    assert found.tolist() == [[1, 1, 1, 1], [1, 2, 0, 0], [1, 4, 1, 1]]  # offset 3 is beyond L


def test_a_draft_is_accepted_with_all_before_it() -> None:
    """Windows of width 3 (hit, miss, hit), 2 (hit, hit) and 1 (miss): E = 2/3 + 1/2 + 0."""
    offsets = torch.tensor([[0, 1, 2, 3, 1, 2, 1]])
    labels = torch.tensor([[1, 1, 1, 1, 1, 1, 1]])
    predicted = torch.tensor([[0, 1, 0, 1, 1, 1, 0]])
    found = tally(torch.zeros(1, 7), predicted, labels, offsets, L=3)
    assert found[:, 3].tolist() == [0, 2, 1, 0]
    assert summarise(found)["accepted"] == pytest.approx(2 / 3 + 1 / 2)
    assert summarise(found)["accuracy_2"] == pytest.approx(1 / 2)


def test_the_heads_gradient_is_summed_over_chunks_in_float32() -> None:
    """It was summed in the head's own type: over many chunks what is small was lost beside the sum."""
    torch.manual_seed(0)
    hidden = torch.ones(2048, 8).bfloat16().requires_grad_()
    head = torch.zeros(4, 8).bfloat16().requires_grad_()
    labels, weights = torch.zeros(2048, dtype=torch.long), torch.full((2048,), 1 / 2048)
    loss, *_ = weighted_cross_entropy(hidden, head, labels, weights, chunk=1)
    gradient = torch.autograd.grad(loss, head)[0].float()
    torch.testing.assert_close(gradient[0], torch.full((8,), -0.75))
    torch.testing.assert_close(gradient[1:], torch.full((3, 8), 0.25))


def test_chunks_cost_bfloat16_little() -> None:
    """A chunk's product is rounded to the head's type: 16 roundings instead of one."""
    torch.manual_seed(0)
    hidden = torch.randn(1024, 64).bfloat16().requires_grad_()
    head = (torch.randn(200, 64) * 0.1).bfloat16().requires_grad_()
    labels, weights = torch.randint(0, 200, (1024,)), torch.full((1024,), 1 / 1024)
    found = []
    for chunk in (64, 1024):
        loss, *_ = weighted_cross_entropy(hidden, head, labels, weights, chunk=chunk)
        found.append(torch.autograd.grad(loss, head)[0].float())
    assert (found[0] - found[1]).norm() < 0.01 * found[1].norm()
