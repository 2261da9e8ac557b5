"""Compare `branch` with a slow reference that runs each window as a separate sequence."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    create_block_mask,
    create_mask,
    flex_attention,
)
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv

from data_prep.windows import replaceable
from tests.conftest import tiny_llama
from tests.infer.engine.test_families import LATENT, MIXED, tiny
from train import attention, window_attention
from train.attention import (
    block_mask,
    dense_mask,
    register,
    trunk_mask,
)
from train.data import to_tensors
from train.model import AdaptiveLM
from train.objective import Layout, branch

L = 3


MODELS = {
    "one, a window of 6": ("mistral", {"sliding_window": 6}),
    "mixed, a window of 12": ("gemma3_text", MIXED | {"sliding_window": 12}),
    # This attention window is narrower than the widest windows of adaptive tokens.
    "mixed, a window of 2": ("olmo3", MIXED | {"sliding_window": 2}),
    "values narrower than keys": ("deepseek_v3", LATENT),
}


def model(attention: str, lm: Any = None) -> AdaptiveLM:
    lm = tiny_llama() if lm is None else lm
    lm.set_attn_implementation(register(attention))
    return AdaptiveLM(lm, chunk=7, L=L)


def random_layout(
    *, adaptive: tuple[int, ...] = (45,), seed: int = 0, widest: int = L, n: int = 40
) -> Layout:
    """Return a branch layout of two sequences of `n` tokens, each of two documents."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 40, size=(2, n))
    documents = np.repeat([[0, 1]], 2, axis=0).repeat(n // 2, axis=1)
    starts = [np.flatnonzero(generator.random(n) < 0.2) for _ in range(2)]
    windows = [(s, generator.integers(1, widest + 1, size=len(s))) for s in starts]
    return branch(
        tokens, documents, windows, replaceable(tokens, documents, [3]), adaptive, w=0.7
    )


def slow_loss(lm: PreTrainedModel, layout: Layout) -> torch.Tensor:
    """Return the loss by plain causal attention, without branches.

    The clean tokens are one sequence. Each window is a sequence of its prefix and its
    adaptive tokens.
    """
    lm.set_attn_implementation("sdpa")
    loss = torch.zeros(())
    batch = to_tensors(layout, torch.device("cpu"))
    names = ("ids", "labels", "offsets", "weights", "positions")
    for ids, labels, offsets, weights, positions in zip(*(batch[n] for n in names)):
        clean = ids[: layout.trunk]
        pieces = [(clean[:0], slice(0, layout.trunk))]
        for first in (offsets == 1).nonzero().flatten().tolist():
            last = first + 1
            while last < len(offsets) and offsets[last] > 1:
                last += 1
            pieces.append((clean[: positions[first]], slice(first, last)))
        for prefix, columns in pieces:
            sequence = torch.cat([prefix, ids[columns]])[None]
            logits = lm(sequence).logits[0, len(prefix) :]
            losses = F.cross_entropy(logits, labels[columns], reduction="none")
            loss = loss + (losses * weights[columns]).sum()
    return loss


def without_blocks(kernel: Any) -> Any:
    """Return a replacement of window_attention.attend that gives `kernel` all keys."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        scaling: float,
        *,
        frozen: bool,
    ) -> Any:
        groups = query.shape[1] // key.shape[1]
        keys = (repeat_kv(tensor, groups) for tensor in (key, value))
        return kernel(query, *keys, mask, scaling, 0.0)

    return attend


@pytest.mark.parametrize("kernel", ["sdpa", "eager", "fused", "dense"])
@pytest.mark.parametrize(
    ("adaptive", "widest"),
    [((45,), L), ((45, 46, 47), L), ((45,), 3 * L)],
    ids=["identical", "diverse", "wider than L"],
)
def test_loss_and_gradient_equal_the_slow_reference(
    kernel: str,
    adaptive: tuple[int, ...],
    widest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = model("eager" if kernel == "eager" else "sdpa")
    if kernel in (
        "fused",
        "dense",
    ):  # the kernels for a GPU, and for a CPU with dropout
        kernels = {"fused": attention._fused, "dense": attention._dense}
        attend = without_blocks(kernels[kernel])
        monkeypatch.setattr(window_attention, "attend", attend)
    layout = random_layout(adaptive=adaptive, widest=widest)
    assert layout.offsets.max() == widest
    check_slow_loss(module, layout)


def check_slow_loss(module: AdaptiveLM, layout: Layout) -> None:
    loss, *_ = module(**to_tensors(layout, torch.device("cpu")))
    names, parameters = zip(*module.lm.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    expected = slow_loss(module.lm, layout)
    references = torch.autograd.grad(expected, parameters)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name, a, b in zip(names, gradients, references, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kernel", ["sdpa", "eager", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_sliding_windows_limit_trunk_and_branches(
    name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: sequences longer than the sliding window were refused."""
    kind, settings = MODELS[name]
    module = model("eager" if kernel == "eager" else "sdpa", tiny(kind, **settings))
    if kernel == "fused":
        attend = without_blocks(attention._fused)
        monkeypatch.setattr(window_attention, "attend", attend)
    check_slow_loss(module, random_layout(widest=4))


def test_the_dense_mask_is_as_drawn_in_objective() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 1, 2, 3]])
    offsets = torch.tensor([[0, 0, 0, 0, 0, 1, 2, 1]])
    expected = [
        [1, 0, 0, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 1, 0],
        [1, 1, 1, 0, 0, 0, 0, 1],
    ]
    assert dense_mask(positions, offsets, 5)[0, 0].int().tolist() == expected


def test_the_dense_mask_with_a_window_is_as_drawn_in_attention() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 3, 3, 4, 3, 4, 5]])
    offsets = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 2, 1, 2, 3]])
    expected = [
        [0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1],
    ]
    assert dense_mask(positions, offsets, 5, 3)[0, 0].int().tolist() == expected
    clean = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert trunk_mask(1, 4, 2, torch.device("cpu"))[0, 0].int().tolist() == clean


@pytest.mark.parametrize("window", [None, 2, 150])
@pytest.mark.parametrize(("n", "widest"), [(40, 3), (300, 3), (1024, 9)])
def test_the_block_mask_equals_the_dense_mask(
    n: int, widest: int, window: int | None
) -> None:
    """Compare with create_block_mask, which builds masks of all pairs (0.9 GiB at 16,384 tokens).

    Only values are compared: flex attention has no gradient on a CPU.
    """
    layout = random_layout(n=n, widest=widest)
    positions, offsets = map(torch.from_numpy, (layout.positions, layout.offsets))
    dense = dense_mask(positions, offsets, n, window)
    block = block_mask(positions, offsets, n, window)
    rows, _, m, c = dense.shape
    assert torch.equal(create_mask(block.mask_mod, rows, 1, m, c, "cpu"), dense)
    expected = create_block_mask(block.mask_mod, rows, None, m, c, device="cpu")
    assert block.seq_lengths == expected.seq_lengths and block.shape == expected.shape
    assert torch.equal(block.to_dense(), expected.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks"):
        assert torch.equal(getattr(block, name), getattr(expected, name)), name
    query = torch.randn(rows, 2, m, 16)
    key, value = torch.randn(2, rows, 2, c, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex_attention warns if it is not compiled
        result = flex_attention(query, key, value, block_mask=block)
    attended = F.scaled_dot_product_attention(query, key, value, dense)
    torch.testing.assert_close(result, attended, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_attention_in_blocks_equals_attention_to_all_keys(
    frozen: bool, dtype: torch.dtype
) -> None:
    """Compare output and gradients. The keys of a frozen trunk must have zero gradient."""
    layout = random_layout(n=300, widest=9)
    positions, offsets = map(torch.from_numpy, (layout.positions, layout.offsets))
    mask = dense_mask(positions, offsets, 300)
    m, c = mask.shape[2:]
    assert m > 2 * window_attention.BLOCK
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 6, m, 16), (2, 2, c, 16), (2, 2, c, 16)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    d_output = torch.randn(2, m, 6, 16, generator=generator).to(dtype)
    results = []
    for tensors in (inputs, [tensor.float() for tensor in inputs]):
        query, key, value = (tensor.clone().requires_grad_() for tensor in tensors)
        if tensors is inputs:
            output = window_attention.attend(
                query, key, value, mask, 0.2, frozen=frozen
            )
        else:
            keys = (repeat_kv(tensor, 3) for tensor in (key, value))
            output = attention._fused(query, *keys, mask, 0.2, 0.0)
        output.backward(d_output.to(output.dtype))
        results.append([output.detach().float()])
        for tensor in (query, key, value):
            assert tensor.grad is not None
            results[-1].append(tensor.grad.float())
    (output, d_query, *d_keys), (slow, d_slow, *d_slow_keys) = results
    trunk = c - m
    close = (
        {"rtol": 1e-4, "atol": 1e-5}
        if dtype == torch.float32
        else {"rtol": 0.1, "atol": 0.1}
    )
    torch.testing.assert_close(output, slow, **close)
    torch.testing.assert_close(d_query, d_slow, **close)
    for fast, reference in zip(d_keys, d_slow_keys, strict=True):
        torch.testing.assert_close(fast[:, :, trunk:], reference[:, :, trunk:], **close)
        if frozen:
            assert not fast[:, :, :trunk].any()
        else:
            torch.testing.assert_close(fast, reference, **close)


def test_blocks_skip_keys_that_no_query_attends_to() -> None:
    """The only branch column that the second query attends to is its own."""
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 0, 1]], dtype=torch.bool)[
        None, None
    ]
    (block,) = window_attention.blocks(mask, torch.float32)
    assert (block.begin, block.prefix, block.first, block.last) == (0, 3, 3, 5)
    only = window_attention._block(0, 1, mask[0, 0], torch.float32)
    assert (only.begin, only.prefix, only.first, only.last) == (0, 3, 4, 5)
    assert only.stop == 2 and only.bias.tolist() == [[0.0] * 4]
    far = mask & (torch.arange(5) > 0)
    (block,) = window_attention.blocks(far, torch.float32)
    assert (block.begin, block.prefix, block.first, block.last) == (1, 3, 3, 5)
    (block,) = window_attention.blocks(far[..., 3:], torch.float32)  # without a trunk
    assert (block.begin, block.prefix, block.first, block.last) == (0, 0, 0, 2)
