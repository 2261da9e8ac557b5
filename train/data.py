"""Choose the sequences of each step and turn them into model inputs.

The order is a pure function of the seed and the step. It does not depend on the number
of ranks, and a resumed run needs only its step.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from data_prep.shards import PackedSequence, Shards
from data_prep.vocab import Vocab
from data_prep.windows import replaceable, sample_windows, window_offsets
from train.config import NOISE, ObjectiveConfig, TrainConfig
from train.inputs import RunInputs
from train.objective import (
    COLUMNS,
    IGNORE,
    Layout,
    basic,
    branch,
    causal,
    dual,
    with_noise,
)

# Random streams of the windows; part of their key.
TRAINING = 0
HELD_OUT = 1
# Appended to the key of a sequence's windows, it gives the key of its noise.
OF_NOISE = 1
# Branch columns are padded to a multiple of this: flex attention compiles per width.
CUDA_COLUMNS = 128
#: Maps (positions, objective, seed) to the starts and widths of a sequence's windows.
Draw = Callable[[int, ObjectiveConfig, Sequence[int]], tuple[np.ndarray, np.ndarray]]


def global_order(seed: int, count: int, start: int, length: int) -> np.ndarray:
    """Return (length,) sequence indices from position `start` of the endless shuffled
    order.

    Each epoch is a new permutation of the `count` sequences.
    """
    positions = np.arange(start, start + length)
    epochs = positions // count
    order = np.empty(length, dtype=np.int64)
    for epoch in np.unique(epochs):
        order[epochs == epoch] = _permutation(seed, int(epoch), count)[
            positions[epochs == epoch] % count
        ]
    return order


@lru_cache(maxsize=2)  # a step may see the end of one epoch and the start of the next
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def rank_batches(
    order: np.ndarray, *, rank: int, ranks: int, micro_batch: int
) -> list[np.ndarray]:
    """Return one rank's micro-batches of a global batch, which must divide evenly."""
    return list(order.reshape(-1, ranks, micro_batch)[:, rank])


class TrainingData(Sequence[PackedSequence]):
    """The sequences of data.path followed by the sequences of data.own, as one list."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.human = Shards(config.data.path, "train")
        self._own = Shards(config.data.own, "train") if config.data.own else ()
        self._own_sequences = config.data.own_sequences(config.global_batch)
        # sequences of data.path in a step
        self.human_sequences = config.global_batch - self._own_sequences

    @property
    def own_share(self) -> float:
        """The share of a step's sequences that come from data.own."""
        return self._own_sequences / self._config.global_batch

    def __len__(self) -> int:
        return len(self.human) + len(self._own)

    def __getitem__(self, index: int) -> PackedSequence:  # type: ignore[override]
        return (
            self.human[index]
            if index < len(self.human)
            else self._own[index - len(self.human)]
        )

    def standard(self, indices: np.ndarray) -> np.ndarray | None:
        """Return factors (n,) of the sequences' losses of standard tokens; None without data.own.

        The factor is 0 for a sequence of data.own. The loss is divided by the tokens of
        all sequences of a step, so the factor of a sequence of data.path is above 1: the
        standard loss becomes a mean over the tokens of data.path.
        """
        if not self._own_sequences:
            return None
        return np.where(
            indices < len(self.human),
            self._config.global_batch / self.human_sequences,
            0.0,
        )

    def order(self, step: int) -> np.ndarray:
        """Return (global_batch,) indices of a step's sequences, data.path's first, then
        data.own's.
        """
        seed = self._config.seed
        human = self.human_sequences
        own = self._own_sequences
        order = global_order(seed, len(self.human), step * human, human)
        if not own:
            return order
        return np.concatenate(
            [
                order,
                len(self.human) + global_order(seed, len(self._own), step * own, own),
            ]
        )


def draw_windows(
    n: int, objective: ObjectiveConfig, seed: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the starts and widths of one sequence's windows."""
    return sample_windows(
        n,
        L=objective.L,
        start_rate=objective.start_rate,
        generator=np.random.default_rng(seed),
    )


def lay_out(
    sequences: Sequence[PackedSequence],
    indices: Sequence[int] | np.ndarray,
    vocab: Vocab,
    objective: ObjectiveConfig,
    *,
    seed: Sequence[int],
    multiple: int = COLUMNS,
    standard: np.ndarray | None = None,
    draw: Draw = draw_windows,
    vocabulary: int = 0,
) -> Layout:
    """Return the objective's layout of the sequences.

    `draw` draws the windows of each sequence with the key (seed, index). With
    objective.mask=noise the window tokens are ids drawn uniformly below `vocabulary`;
    their key is (seed, index) too, so they are the same in every micro-batch and on every
    rank. `multiple` and `standard` are arguments of `objective.branch`. A sequence with
    `standard` 0 is the model's own text: it may end where generation was stopped, so no
    draft in it predicts EOS.
    """
    tokens = np.stack([sequence.tokens for sequence in sequences]).astype(np.int64)
    documents = np.stack([sequence.documents for sequence in sequences])
    if objective.name == "causal":
        return causal(tokens, documents)
    layout = _lay_windows(
        tokens,
        documents,
        indices,
        vocab,
        objective,
        seed=seed,
        multiple=multiple,
        standard=standard,
        draw=draw,
    )
    if objective.mask != NOISE:
        return layout
    # Noise is drawn for the columns after the trunk with branch, for all columns with dual.
    first = layout.trunk if layout.ids.shape[1] > layout.trunk else 0
    noise = np.zeros_like(layout.ids)
    for row, index in enumerate(np.resize(indices, len(noise))):
        generator = np.random.default_rng((*seed, int(index), OF_NOISE))
        count = noise.shape[1] - first
        noise[row, first:] = generator.integers(vocabulary, size=count)
    return with_noise(layout, noise)


def _lay_windows(
    tokens: np.ndarray,
    documents: np.ndarray,
    indices: Sequence[int] | np.ndarray,
    vocab: Vocab,
    objective: ObjectiveConfig,
    *,
    seed: Sequence[int],
    multiple: int,
    standard: np.ndarray | None,
    draw: Draw,
) -> Layout:
    """Return the layout with one id in all windows, or one id per offset."""
    adaptive = objective.adaptive_ids(vocab.adaptive) or (objective.mask_id or 0,)
    free = replaceable(tokens, documents, sorted(vocab.control))
    windows = [
        draw(tokens.shape[1], objective, (*seed, int(index))) for index in indices
    ]
    if objective.name == "branch":
        if standard is not None:
            free[:, :-1] &= (standard[:, None] > 0) | (tokens[:, 1:] != vocab.eos)
        return branch(
            tokens,
            documents,
            windows,
            free,
            adaptive,
            w=objective.w,
            masked_mean=objective.masked_mean,
            multiple=multiple,
            standard=standard,
        )
    offsets = np.stack(
        [window_offsets(*window, free[row]) for row, window in enumerate(windows)]
    )
    if objective.diverse:
        # Adjacent windows may form a run with more offsets than ids: the positions after
        # offset L keep their standard tokens.
        offsets[offsets > objective.L] = 0
    if objective.name == "basic":
        return basic(tokens, documents, offsets, adaptive)
    return dual(
        tokens,
        documents,
        offsets,
        adaptive,
        w=objective.w,
        masked_mean=objective.masked_mean,
    )


def to_tensors(layout: Layout, device: torch.device) -> dict[str, Any]:
    """Return the layout's arrays as tensors on the device, and `trunk`, by name."""
    return {
        name: value if name == "trunk" else torch.from_numpy(value).to(device)
        for name, value in vars(layout).items()
    }


def load_batch(
    shards: Sequence[PackedSequence],
    indices: np.ndarray,
    vocab: Vocab,
    objective: ObjectiveConfig,
    *,
    seed: Sequence[int],
    device: torch.device,
    standard: np.ndarray | None = None,
    draw: Draw = draw_windows,
    vocabulary: int = 0,
) -> dict[str, Any]:
    """Read one micro-batch and return its layout on the device.

    `standard`, `draw` and `vocabulary` are passed to `lay_out`.
    """
    layout = lay_out(
        [shards[int(index)] for index in indices],
        indices,
        vocab,
        objective,
        seed=seed,
        multiple=CUDA_COLUMNS if device.type == "cuda" else COLUMNS,
        standard=standard,
        draw=draw,
        vocabulary=vocabulary,
    )
    return to_tensors(layout, device)


def share_masked_mean(batches: Sequence[dict[str, Any]], *, ranks: int) -> None:
    """Divide the masked terms of a step by its mean number of masked positions, in place.

    A layout with objective.masked_mean=masked divides by its own number, so that a position
    would count more in a micro-batch with few of them. `batches` are this rank's micro-batches.
    The engine averages over all micro-batches. Every rank must call this.
    """
    counts = [
        ((batch["labels"] != IGNORE) & (batch["offsets"] > 0)).sum()
        for batch in batches
    ]
    total = torch.stack(counts).sum().double()
    dist.all_reduce(total)
    mean = (total / (len(batches) * ranks)).clamp(min=1e-9)  # above 0 without positions
    for batch, count in zip(batches, counts, strict=True):
        factors = torch.where(batch["offsets"] > 0, count / mean, 1.0)
        batch["weights"] = batch["weights"] * factors.float()


def trained_on(inputs: RunInputs, own_share: float) -> dict[str, Any]:
    """Return the facts of the data that the model card shows.

    It has the number of documents and tokens, documents by layout (plain, chat and the
    orders of infilling), languages by descending tokens, and the benchmarks that the data
    is decontaminated against (None if unknown). `own` has documents and tokens of data.own,
    and `own_share`, its share of a step's sequences.
    """
    train = inputs.data["train"]
    languages = sorted(
        train["languages"], key=lambda name: -train["languages"][name]["tokens"]
    )
    totals = {name: train[name] for name in ("documents", "tokens", "modes")}
    facts = {
        **totals,
        "languages": languages,
        "decontaminated": inputs.data.get("decontaminated"),
    }
    if inputs.own:
        own = {name: inputs.own["train"][name] for name in ("documents", "tokens")}
        facts["own"] = {**own, "share": own_share}
    return facts
