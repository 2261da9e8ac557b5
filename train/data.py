"""Which sequences a step sees, and their rows. Knows shards; knows no model.

The order is a pure function of the seed and the step: ranks and workers change nothing in
it, and a resumed run needs no state but its step.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from conf import LoneError
from data_prep.shards import PackedSequence, Shards
from data_prep.vocab import Vocab
from train.config import ObjectiveConfig
from train.objective.adaptive import retain, sample_windows, widen, window_offsets
from train.objective.layout import COLUMNS, Layout, basic, branch, causal, dual, replaceable

TRAINING, HELD_OUT = 0, 1  # streams that windows are drawn from
# Branch columns come in multiples of it on CUDA, where a width that is new to flex attention is compiled.
CUDA_COLUMNS = 128


def global_order(seed: int, count: int, start: int, length: int) -> np.ndarray:
    """(length,) sequence indices from position `start` of the endless shuffled order.

    Every epoch is a permutation of `count` sequences of its own.
    """
    positions = np.arange(start, start + length)
    epochs = positions // count
    order = np.empty(length, dtype=np.int64)
    for epoch in np.unique(epochs):
        order[epochs == epoch] = _permutation(seed, int(epoch), count)[positions[epochs == epoch] % count]
    return order


@lru_cache(maxsize=2)  # a step may meet the end of one epoch and the start of the next
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def rank_batches(order: np.ndarray, *, rank: int, ranks: int, micro_batch: int) -> list[np.ndarray]:
    """One rank's micro-batches of a global batch, which must divide evenly."""
    mine = order.reshape(-1, ranks, micro_batch)[:, rank]
    return list(mine)


def adaptive_ids(vocab: Vocab, objective: ObjectiveConfig) -> tuple[int, ...]:
    """The ids that the objective uses: `causal` none. Raises ValueError for more offsets than diverse ids."""
    if objective.name == "causal":
        return ()
    if not objective.diverse:
        return vocab.adaptive[:1]
    if len(vocab.adaptive) < objective.L:
        raise ValueError(f"objective.L={objective.L}: wanted at most the {len(vocab.adaptive)} diverse ids")
    return vocab.adaptive[: objective.L]


def lay_out(
    sequences: Sequence[PackedSequence],
    indices: Sequence[int] | np.ndarray,
    vocab: Vocab,
    objective: ObjectiveConfig,
    *,
    seed: Sequence[int],
    multiple: int = COLUMNS,
) -> Layout:
    """The objective's layout of some sequences; windows are keyed by (seed, index). `multiple` is branch's."""
    tokens = np.stack([sequence.tokens for sequence in sequences]).astype(np.int64)
    documents = np.stack([sequence.documents for sequence in sequences])
    if objective.name == "causal":
        return causal(tokens, documents)
    adaptive = adaptive_ids(vocab, objective)
    free = replaceable(tokens, documents, sorted(vocab.control))
    windows = [draw_windows(tokens.shape[1], objective, seed=(*seed, int(index))) for index in indices]
    w, mean = objective.w, objective.masked_mean
    if objective.name == "branch":
        return branch(tokens, documents, windows, free, adaptive, w=w, masked_mean=mean, multiple=multiple)
    offsets = np.stack([window_offsets(*window, free[row]) for row, window in enumerate(windows)])
    if objective.diverse:
        # A run of touching windows may be longer than there are ids: its rest stays standard.
        offsets[offsets > objective.L] = 0
    if objective.name == "basic":
        return basic(tokens, documents, offsets, adaptive)
    return dual(tokens, documents, offsets, adaptive, w=w, masked_mean=mean)


def draw_windows(n: int, objective: ObjectiveConfig, *, seed: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Starts and widths of one sequence's windows."""
    generator = np.random.default_rng(seed)
    starts, widths = sample_windows(n, L=objective.L, start_rate=objective.start_rate, generator=generator)
    if objective.wide_share:
        widths = widen(
            widths, L=objective.L, L_max=objective.L_max, share=objective.wide_share, generator=generator
        )
    if objective.retention < 1:
        widths = retain(widths, rate=objective.retention, floor=objective.retention_floor, generator=generator)
    return starts, widths


def to_tensors(layout: Layout, device: torch.device) -> dict[str, Any]:
    """The layout's arrays on the device, by name, and its trunk."""
    arrays = {name: value for name, value in vars(layout).items() if name != "trunk"}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"trunk": layout.trunk}


def load_batch(
    shards: Shards,
    indices: np.ndarray,
    vocab: Vocab,
    objective: ObjectiveConfig,
    *,
    seed: Sequence[int],
    device: torch.device,
) -> dict[str, Any]:
    """Read, lay out and move one micro-batch.

    Raises LoneError for a sequence that holds an adaptive id: what text produces cannot be adaptive.
    """
    sequences = [shards[int(index)] for index in indices]
    for index, sequence in zip(indices, sequences, strict=True):
        if np.isin(sequence.tokens, vocab.adaptive).any():
            raise LoneError(
                f"data.path: wanted adaptive ids {list(vocab.adaptive)} that no text holds, "
                f"found one in sequence {index}"
            )
    multiple = CUDA_COLUMNS if device.type == "cuda" else COLUMNS
    layout = lay_out(sequences, indices, vocab, objective, seed=seed, multiple=multiple)
    return to_tensors(layout, device)
