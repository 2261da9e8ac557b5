"""Which sequences a step sees, and their rows. Knows shards; knows no model.

The order is a pure function of the seed and the step: ranks and workers change nothing in
it, and a resumed run needs no state but its step.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from conf import RankLocalError
from data_prep.shards import PackedSequence, Shards
from data_prep.vocab import Vocab
from train.config import ObjectiveConfig, TrainConfig
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


class TrainingData(Sequence[PackedSequence]):
    """The sequences of data.path, and behind them those of data.own, by one index."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.human = Shards(config.data.path, "train")
        self._own = Shards(config.data.own, "train") if config.data.own else ()

    def __len__(self) -> int:
        return len(self.human) + len(self._own)

    def __getitem__(self, index: int) -> PackedSequence:  # type: ignore[override]
        return self.human[index] if index < len(self.human) else self._own[index - len(self.human)]

    @property
    def human_sequences(self) -> int:
        """Sequences of data.path in a step."""
        return self._config.global_batch - self._config.data.own_sequences(self._config.global_batch)

    def standard(self, indices: np.ndarray) -> np.ndarray | None:
        """(n,) factors of these sequences' standard terms; None where all are of data.path.

        0 of the model's own text. A step's terms are divided by the tokens of all its sequences: those of
        data.path are multiplied so that theirs is a mean over their own tokens.
        """
        if not self._config.data.own:
            return None
        return np.where(indices < len(self.human), self._config.global_batch / self.human_sequences, 0.0)

    def order(self, step: int) -> np.ndarray:
        """(global_batch,) indices of a step's sequences: those of data.path, then those of data.own."""
        seed, human = self._config.seed, self.human_sequences
        own = self._config.global_batch - human
        order = global_order(seed, len(self.human), step * human, human)
        if not own:
            return order
        return np.concatenate([order, len(self.human) + global_order(seed, len(self._own), step * own, own)])


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
    standard: np.ndarray | None = None,
) -> Layout:
    """The objective's layout of some sequences; windows are keyed by (seed, index).

    `multiple` and `standard` are branch's. A sequence whose standard term has the factor 0 is the model's own
    text: it ends where generation was stopped, so no draft in it predicts EOS.
    """
    tokens = np.stack([sequence.tokens for sequence in sequences]).astype(np.int64)
    documents = np.stack([sequence.documents for sequence in sequences])
    if objective.name == "causal":
        return causal(tokens, documents)
    adaptive = adaptive_ids(vocab, objective)
    free = replaceable(tokens, documents, sorted(vocab.control))
    windows = [draw_windows(tokens.shape[1], objective, seed=(*seed, int(index))) for index in indices]
    w, mean = objective.w, objective.masked_mean
    if objective.name == "branch":
        if standard is not None:
            free[:, :-1] &= (standard[:, None] > 0) | (tokens[:, 1:] != vocab.eos)
        return branch(
            tokens,
            documents,
            windows,
            free,
            adaptive,
            w=w,
            masked_mean=mean,
            multiple=multiple,
            standard=standard,
        )
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
    shards: Sequence[PackedSequence],
    indices: np.ndarray,
    vocab: Vocab,
    objective: ObjectiveConfig,
    *,
    seed: Sequence[int],
    device: torch.device,
    standard: np.ndarray | None = None,
) -> dict[str, Any]:
    """Read, lay out and move one micro-batch; `standard` is that of `lay_out`.

    Raises RankLocalError for a sequence that holds an adaptive id: what text produces cannot be adaptive.
    """
    sequences = [shards[int(index)] for index in indices]
    for index, sequence in zip(indices, sequences, strict=True):
        if np.isin(sequence.tokens, vocab.adaptive).any():
            raise RankLocalError(
                f"data.path: wanted adaptive ids {list(vocab.adaptive)} that no text holds, "
                f"found one in sequence {index}"
            )
    multiple = CUDA_COLUMNS if device.type == "cuda" else COLUMNS
    layout = lay_out(sequences, indices, vocab, objective, seed=seed, multiple=multiple, standard=standard)
    return to_tensors(layout, device)
