import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from train.loss import CANDIDATES, draft_loss, summarise, tally
from train.objective import IGNORE


def reference(hidden, head, labels, weights, teachers, soft):
    """Compute the loss with all logits at once and position by position, for autograd."""
    logits = (hidden @ head.T).float()
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE)
    learned = list(losses)
    for t in range(len(labels)):
        if teachers[t] < 0 or labels[t] == IGNORE:
            continue
        log_q = logits[t].log_softmax(-1)
        p = logits[teachers[t]].detach().softmax(-1)
        learned[t] = (1 - soft) * losses[t] - soft * (p * log_q).sum()
    return (torch.stack(learned) * weights).sum(), losses, logits.argmax(-1)


SOFT = [0.0, 0.3, 1.0]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.integers(1, 31),
    st.sampled_from(SOFT),
    st.integers(0, 10**6),
)
def test_the_loss_in_chunks_equals_the_reference(
    windows: list[int], chunk: int, soft: float, seed: int
) -> None:
    """Compare value and gradients; inputs are float64, logits float32.

    `windows` are widths of windows; 0 is a standard token.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor(
        [j for width in windows for j in (range(1, width + 1) if width else [0])]
    )
    T = len(offsets)
    hidden, head = (
        torch.randn(rows, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for rows in (T, 11)
    )
    labels = torch.randint(0, 11, (T,), generator=generator)
    labels[(torch.rand(T, generator=generator) < 0.3) & (offsets == 0)] = IGNORE
    weights = torch.rand(T, generator=generator)
    # The teacher of a position is any other position.
    shift = torch.randint(1, max(T, 2), (T,), generator=generator)
    teachers = torch.where((offsets > 0) & (T > 1), (torch.arange(T) + shift) % T, -1)
    expected, losses, likeliest = reference(
        hidden, head, labels, weights, teachers, soft
    )
    loss, entropies, predicted = draft_loss(
        hidden,
        head,
        labels,
        weights,
        chunk=chunk,
        teachers_T=teachers,
        soft=soft,
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropies, losses, rtol=1e-5, atol=1e-6)
    assert torch.equal(predicted, likeliest.where(labels != IGNORE, IGNORE))
    gradients = torch.autograd.grad(loss * 3, [hidden, head])
    references = torch.autograd.grad(expected * 3, [hidden, head])
    for a, b in zip(gradients, references, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("soft", SOFT)
def test_the_previous_token_head_learns_among_the_likeliest_tokens(soft: float) -> None:
    """Half of the loss is of the states before the head, half of the states after it."""
    generator = torch.Generator().manual_seed(0)
    T, V = 12, 3 * CANDIDATES
    hidden, corrected = (
        torch.randn(T, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for _ in range(2)
    )
    head = torch.randn(V, 8, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, V, (T,), generator=generator)
    teachers = torch.tensor([-1] * 4 + [*range(8)])
    weights = torch.rand(T, generator=generator)
    uncorrected, losses, _ = reference(hidden, head, labels, weights, teachers, soft)
    of_head = torch.zeros((), dtype=torch.float64)
    likeliest = torch.empty_like(labels)
    for t in range(T):
        logits = hidden[t].detach() @ head.T
        ids = logits.topk(CANDIDATES).indices
        target = F.one_hot(labels[t], V).double()
        if teachers[t] >= 0:
            p = (hidden[teachers[t]].detach() @ head.T).softmax(-1)
            target = (1 - soft) * target + soft * p
        scores = corrected[t] @ head[ids].T
        of_head = of_head - weights[t] * (target[ids] * scores.log_softmax(-1)).sum()
        likeliest[t] = ids[scores.argmax()]
    loss, entropies, predicted = draft_loss(
        hidden,
        head,
        labels,
        weights,
        chunk=5,
        teachers_T=teachers,
        soft=soft,
        corrected_Td=corrected,
    )
    expected = (uncorrected + of_head) / 2
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6, check_dtype=False)
    torch.testing.assert_close(entropies, losses, rtol=1e-5, atol=1e-6)
    assert torch.equal(predicted, likeliest)
    inputs = [hidden, corrected]
    for gradient, slow in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs)
    ):
        torch.testing.assert_close(gradient, slow, rtol=1e-4, atol=1e-6)


def test_a_draft_is_accepted_only_with_all_earlier_drafts() -> None:
    """Windows of width 3 (hit, miss, hit), 2 (hit, hit) and 1 (miss): E = 2/3 + 1/2.

    An offset above L does not count.
    """
    offsets = torch.tensor([[0, 1, 2, 3, 1, 2, 1, 4]])
    labels = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1]])
    predicted = torch.tensor([[0, 1, 0, 1, 1, 1, 0, 1]])
    losses = torch.tensor([[0.0, 1.0, 2.0, 4.0, 1.0, 2.0, 1.0, 8.0]])
    result = tally(losses, predicted, labels, offsets, L=3)
    # counts, losses, hits and accepted drafts, by offset
    assert result.tolist() == [[1, 0, 0, 0], [3, 3, 2, 2], [2, 4, 1, 1], [1, 4, 1, 0]]
    assert summarise(result)["accepted"] == pytest.approx(2 / 3 + 1 / 2)
    assert summarise(result)["accuracy_2"] == pytest.approx(1 / 2)


def test_the_output_heads_gradient_is_summed_over_chunks_in_float32() -> None:
    """Bug: the sum was in bfloat16 and lost small terms."""
    hidden = torch.ones(2048, 8).bfloat16().requires_grad_()
    head = torch.zeros(4, 8).bfloat16().requires_grad_()
    labels = torch.zeros(2048, dtype=torch.long)
    weights = torch.full((2048,), 1 / 2048)
    loss, *_ = draft_loss(hidden, head, labels, weights, chunk=1)
    (gradient,) = torch.autograd.grad(loss, head)
    expected = torch.tensor([-0.75, 0.25, 0.25, 0.25], dtype=torch.bfloat16)
    assert torch.equal(gradient, expected[:, None].expand(4, 8))
