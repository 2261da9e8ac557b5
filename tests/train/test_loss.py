import pytest
import torch
import torch.nn.functional as F

from train.layout import IGNORE
from train.loss import weighted_cross_entropy
from train.metrics import tally


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_chunks_change_neither_value_nor_gradient(chunk: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(8, 11, bias=False, dtype=torch.float64)
    labels = torch.randint(0, 11, (20,))
    labels[::3] = IGNORE
    weights = torch.rand(20)
    # Float32 inside, as in training: the reference does the same.
    logits = head(hidden).float()
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE)
    reference = (losses * weights).sum()
    wanted = torch.autograd.grad(reference, [hidden, head.weight])
    loss, per_position, correct = weighted_cross_entropy(hidden, head, labels, weights, chunk=chunk)
    found = torch.autograd.grad(loss, [hidden, head.weight])
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    for ours, theirs in zip(found, wanted):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(per_position, losses, rtol=1e-6, atol=1e-7)
    assert torch.equal(correct, logits.argmax(-1) == labels)


def test_nothing_to_predict_still_has_a_gradient() -> None:
    """A rank whose micro-batch has no masked position must take part in the backward pass."""
    hidden = torch.randn(4, 8, requires_grad=True)
    head = torch.nn.Linear(8, 11)
    loss, *_ = weighted_cross_entropy(hidden, head, torch.full((4,), IGNORE), torch.ones(4), chunk=2)
    loss.backward()
    assert loss.item() == 0 and hidden.grad is not None and not hidden.grad.any()


def test_tally_sums_by_offset() -> None:
    labels = torch.tensor([5, 5, IGNORE, 5, 5])
    offsets = torch.tensor([0, 1, 1, 2, 3])
    losses = torch.tensor([1.0, 2.0, 0.0, 4.0, 8.0])
    correct = torch.tensor([True, False, False, True, True])
    found = tally(losses, correct, labels, offsets, L=2)
    assert found.tolist() == [[1, 1, 1], [1, 2, 0], [1, 4, 1]]  # offset 3 is beyond L
