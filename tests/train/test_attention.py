"""`branch` against the slow reference that runs every window as a sequence of its own."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import (
    create_block_mask,
    create_mask,
    flex_attention,
)
from transformers import LlamaConfig, LlamaForCausalLM

from data_prep.windows import replaceable
from train import attention
from train.attention import (
    block_mask,
    dense_mask,
    register,
)
from train.data import to_tensors
from train.model import AdaptiveLM
from train.objective import IGNORE, Layout, branch

L, N = 3, 40


@pytest.fixture(params=["sdpa", "eager"])
def module(request: pytest.FixtureRequest) -> AdaptiveLM:
    return model(request.param)


def model(attention: str, *, kv_heads: int = 2, hidden: int = 32) -> AdaptiveLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        initializer_range=0.3,
    )
    lm = LlamaForCausalLM._from_config(config, attn_implementation=register(attention))
    return AdaptiveLM(lm, chunk=7, L=L)


def a_layout(
    *, adaptive: tuple[int, ...] = (45,), seed: int = 0, widest: int = L
) -> Layout:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 40, size=(2, N))
    documents = np.repeat([[0, 1]], 2, axis=0).repeat(N // 2, axis=1)
    starts = [np.flatnonzero(generator.random(N) < 0.2) for _ in range(2)]
    windows = [(s, generator.integers(1, widest + 1, size=len(s))) for s in starts]
    return branch(
        tokens, documents, windows, replaceable(tokens, documents, [3]), adaptive, w=0.7
    )


def slow_loss(lm: LlamaForCausalLM, layout: Layout) -> torch.Tensor:
    """Y by the library's own causal attention; then each window's prefix and tokens,
    one sequence each.
    """
    lm.set_attn_implementation("sdpa")
    loss = torch.zeros(())
    for ids, labels, offsets, weights, positions in zip(
        layout.ids,
        layout.labels,
        layout.offsets,
        layout.weights,
        layout.positions,
        strict=True,
    ):
        clean = torch.from_numpy(ids[: layout.trunk])[None]
        pieces = [(lm(clean).logits[0], slice(0, layout.trunk))]
        for first in np.flatnonzero(offsets == 1):
            last = first + 1
            while last < len(offsets) and offsets[last] > 1:
                last += 1
            tokens = torch.from_numpy(ids[first:last])[None]
            sequence = torch.cat([clean[:, : positions[first]], tokens], dim=1)
            pieces.append(
                (lm(sequence).logits[0, positions[first] :], slice(first, last))
            )
        for logits, place in pieces:
            losses = F.cross_entropy(
                logits,
                torch.from_numpy(labels[place]),
                reduction="none",
                ignore_index=IGNORE,
            )
            loss = loss + (losses * torch.from_numpy(weights[place])).sum()
    return loss


@pytest.mark.parametrize(
    ("adaptive", "widest"),
    [((45,), L), ((45, 46, 47), L), ((45,), 3 * L)],
    ids=["identical", "diverse", "wider than L"],
)
def test_value_and_gradient_are_those_of_every_window_alone(
    module: AdaptiveLM, adaptive: tuple[int, ...], widest: int
) -> None:
    layout = a_layout(adaptive=adaptive, widest=widest)
    assert layout.offsets.max() == widest
    loss, *_ = module(**to_tensors(layout, torch.device("cpu")))
    names, parameters = zip(*module.lm.named_parameters(), strict=True)
    ours = torch.autograd.grad(loss, parameters)
    expected = slow_loss(module.lm, layout)
    theirs = torch.autograd.grad(expected, parameters)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name, a, b in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_dense_mask_is_the_layouts_picture() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 1, 2, 3]])
    offsets = torch.tensor([[0, 0, 0, 0, 0, 1, 2, 1]])
    expected = [
        [1, 0, 0, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 1, 0],
        [1, 1, 1, 0, 0, 0, 0, 1],
    ]
    assert dense_mask(positions, offsets, 5)[0, 0].int().tolist() == expected


def test_the_block_mask_is_the_dense_mask() -> None:
    """And flex attention under it gives what dense attention gives (values: a CPU has
    no gradient of it).
    """
    layout = a_layout()
    positions, offsets = (
        torch.from_numpy(layout.positions.copy()),
        torch.from_numpy(layout.offsets),
    )
    dense, block = (mask(positions, offsets, N) for mask in (dense_mask, block_mask))
    r, _, m, c = dense.shape
    assert torch.equal(create_mask(block.mask_mod, r, 1, m, c, device="cpu"), dense)
    query, key, value = (
        torch.randn(r, 2, m, 16),
        torch.randn(r, 2, c, 16),
        torch.randn(r, 2, c, 16),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uncompiled, as it warns
        result = flex_attention(query, key, value, block_mask=block)
    expected = F.scaled_dot_product_attention(query, key, value, dense)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("n", "m", "rows"), [(40, 16, 2), (300, 200, 2), (384, 128, 1), (1000, 256, 1)]
)
def test_the_block_mask_is_built_without_any_mask_of_all_pairs(
    n: int, m: int, rows: int
) -> None:
    """create_block_mask took 0.9 GiB at 16,384 tokens. The blocks must be those that it
    finds.
    """
    generator = np.random.default_rng(n)
    positions, offsets = (
        np.tile(np.arange(n + m), (rows, 1)),
        np.zeros((rows, n + m), dtype=np.int64),
    )
    for row in range(rows):
        start, column = 1, n
        while (
            column < n + m - 9
        ):  # the rest fills up, as columns that see the first token alone
            width = int(generator.integers(1, 8))
            positions[row, column : column + width] = start + np.arange(width)
            offsets[row, column : column + width] = 1 + np.arange(width)
            start, column = int(generator.integers(start, n - 8)), column + width
        positions[row, column:] = 0
    result = block_mask(torch.from_numpy(positions), torch.from_numpy(offsets), n)
    expected = create_block_mask(result.mask_mod, rows, None, m, n + m, device="cpu")
    assert result.seq_lengths == expected.seq_lengths and result.shape == expected.shape
    assert torch.equal(result.to_dense(), expected.to_dense())
    for name in (
        "kv_num_blocks",
        "full_kv_num_blocks",
        "q_num_blocks",
        "full_q_num_blocks",
    ):
        assert torch.equal(getattr(result, name), getattr(expected, name)), name
    for count, places in (
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
    ):
        valid = (
            torch.arange(getattr(result, places).shape[-1])
            < getattr(result, count)[..., None]
        )
        assert torch.equal(
            getattr(result, places)[valid], getattr(expected, places)[valid]
        ), places


def test_the_fused_kernel_is_the_dense_one(
    module: AdaptiveLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """objective.attention=dense on a GPU had no path at all: value and gradient of what
    it takes there.
    """
    batch = to_tensors(a_layout(), torch.device("cpu"))
    parameters = list(module.lm.parameters())
    loss, *_ = module(**batch)
    expected = torch.autograd.grad(loss, parameters)
    monkeypatch.setattr(attention, "_dense", attention._fused)
    again, *_ = module(**batch)
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=1e-6)
    for a, b in zip(torch.autograd.grad(again, parameters), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
