"""Compute attention of branch columns on a CPU, in blocks of queries that skip unneeded keys.

A branch column attends to a prefix of the trunk and to a few branch columns
(train/attention.py). Windows are sorted by the length of their prefix, so the BLOCK queries
of a block together attend to a prefix and a few adjacent branch columns:

                trunk         branches
    block 1     1 1 1 · · ·   1 · · · ·
                1 1 1 · · ·   1 1 · · ·
    block 2     1 1 1 1 1 ·   · · 1 · ·
                1 1 1 1 1 ·   · · 1 1 ·

Block 1 is multiplied with 3 + 2 keys instead of 11. In a layer with a sliding window, a
block also skips the trunk keys before all its windows. The trunk of such a layer is computed
here too, with a square mask. The query heads that share a key head are rows of one product,
so no key is repeated. The backward pass is written by hand: autograd would add up a tensor
of all keys for each block, and would compute the gradient of a frozen trunk.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 64  # queries in a block


class Block(NamedTuple):
    """Queries `start` to `stop` of a row; their keys are `begin` to `prefix` and `first` to `last`.

    The first range of keys is in the trunk, the second in the branches. `bias` (queries,
    keys) is 0 where a query attends to a key, else -inf.
    """

    row: int
    start: int
    stop: int
    begin: int
    prefix: int
    first: int
    last: int
    bias: Tensor


# Layers of one type share a mask, and share another mask for their trunk. The cache compares
# tensors by identity.
@lru_cache(maxsize=4)
def blocks(mask: Tensor, dtype: torch.dtype) -> tuple[Block, ...]:
    """Return the blocks of a (r, 1, m, c) bool mask, True = attend.

    The last m of the c keys belong to the same columns as the m queries.
    """
    return tuple(
        _block(row, start, mask[row, 0], dtype)
        for row in range(len(mask))
        for start in range(0, mask.shape[2], BLOCK)
    )


def _block(row: int, start: int, mask: Tensor, dtype: torch.dtype) -> Block:
    sees = mask[start : start + BLOCK]
    trunk = mask.shape[1] - mask.shape[0]
    seen = sees.any(dim=0)
    begin, prefix = _extent(seen[:trunk])
    first, last = (trunk + index for index in _extent(seen[trunk:]))
    sees = torch.cat([sees[:, begin:prefix], sees[:, first:last]], dim=1)
    bias = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -torch.inf)
    return Block(row, start, start + len(sees), begin, prefix, first, last, bias)


def _extent(seen: Tensor) -> tuple[int, int]:
    """Return the index of the first True and the index after the last; (0, 0) without True."""
    indices = seen.nonzero()
    return (int(indices[0]), int(indices[-1]) + 1) if len(indices) else (0, 0)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    *,
    frozen: bool,
) -> Tensor:
    """Return attention (r, m, heads, d) of (r, heads, m, d) queries to (r, kv_heads, c, d) keys.

    With `frozen` the first c - m keys and values get no gradient.
    """
    result: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query, key, value, blocks(mask, query.dtype), scaling, frozen
    )
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        parts: tuple[Block, ...],
        scaling: float,
        frozen: bool,
    ) -> Tensor:
        r, heads, m, d = query.shape
        query = query * scaling
        output = query.new_empty(r, m, heads, value.shape[-1])
        weights = []
        for block, q, k, v in _gather(query, key, value, parts):
            scores = q @ k.mT
            scores.view(len(k), -1, *block.bias.shape).add_(block.bias)
            weights.append(torch.softmax(scores, dim=-1))
            attended = (weights[-1] @ v).view(heads, -1, v.shape[-1])
            output[block.row, block.start : block.stop] = attended.transpose(0, 1)
        ctx.parts, ctx.scaling, ctx.frozen = parts, scaling, frozen
        ctx.save_for_backward(query, key, value, *weights)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *weights = ctx.saved_tensors
        r, heads, m, d = query.shape
        d_query = torch.empty_like(query)
        # In bfloat16 a sum over blocks would lose small terms.
        wide = torch.promote_types(key.dtype, torch.float32)
        d_key = torch.zeros_like(key, dtype=wide)
        d_value = torch.zeros_like(value, dtype=wide)
        d_outputs = d_output.transpose(1, 2)
        for (block, q, k, v), p in zip(_gather(query, key, value, ctx.parts), weights):
            d_o = _rows(d_outputs, block, len(k))
            d_scores = torch.ops.aten._softmax_backward_data(d_o @ v.mT, p, -1, p.dtype)
            d_q = (d_scores @ k).view(heads, -1, d)
            torch.mul(
                d_q, ctx.scaling, out=d_query[block.row, :, block.start : block.stop]
            )
            clean = block.prefix - block.begin
            skipped = clean if ctx.frozen else 0
            d_k = d_scores[..., skipped:].mT @ q
            d_v = p[..., skipped:].mT @ d_o
            for total, part in ((d_key, d_k), (d_value, d_v)):
                branch = part[:, clean - skipped :]
                total[block.row, :, block.first : block.last] += branch
                if not ctx.frozen:
                    total[block.row, :, block.begin : block.prefix] += part[:, :clean]
        return d_query, d_key.to(key.dtype), d_value.to(key.dtype), None, None, None


def _gather(
    query: Tensor, key: Tensor, value: Tensor, parts: tuple[Block, ...]
) -> Iterator[tuple[Block, Tensor, Tensor, Tensor]]:
    """Yield each block with its queries (kv_heads, rows, d), keys and values (kv_heads, keys, d)."""
    for block in parts:
        k, v = (
            torch.cat(
                [
                    keys[block.row, :, block.begin : block.prefix],
                    keys[block.row, :, block.first : block.last],
                ],
                dim=1,
            )
            for keys in (key, value)
        )
        yield block, _rows(query, block, len(k)), k, v


def _rows(query: Tensor, block: Block, kv_heads: int) -> Tensor:
    """Return a block's queries as (kv_heads, rows, d): the rows of all heads that share a key head."""
    queries = query[block.row, :, block.start : block.stop]
    return queries.reshape(kv_heads, -1, queries.shape[-1])
