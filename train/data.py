"""Which sequences a step sees, and their rows.

The order is a pure function of the seed and the step: ranks and workers do not change
it, and a resumed run needs no state but its step.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from conf.runs.stage import read_manifest
from data_prep.shards import PackedSequence, Shards
from data_prep.vocab import Vocab
from data_prep.windows import replaceable, sample_windows, window_offsets
from train.config import NOISE, ObjectiveConfig, TrainConfig
from train.objective import COLUMNS, Layout, basic, branch, causal, dual, with_noise

# streams that windows are drawn from
TRAINING = 0
HELD_OUT = 1
# Follows the key of a sequence's windows in that of its noise.
OF_NOISE = 1
# Branch columns are padded to multiples of it: flex attention compiles for each width.
CUDA_COLUMNS = 128
#: From positions, objective and seed to the starts and widths of a sequence's windows.
Draw = Callable[[int, ObjectiveConfig, Sequence[int]], tuple[np.ndarray, np.ndarray]]


def global_order(seed: int, count: int, start: int, length: int) -> np.ndarray:
    """Return (length,) sequence indices from position `start` of the endless shuffled
    order.

    Every epoch is another permutation of `count` sequences.
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
    """The sequences of data.path, followed by those of data.own, under one index."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.human = Shards(config.data.path, "train")
        self._own = Shards(config.data.own, "train") if config.data.own else ()
        self._own_sequences = config.data.own_sequences(config.global_batch)
        self.human_sequences = (
            config.global_batch - self._own_sequences
        )  # of data.path, in a step

    def __len__(self) -> int:
        return len(self.human) + len(self._own)

    def __getitem__(self, index: int) -> PackedSequence:  # type: ignore[override]
        return (
            self.human[index]
            if index < len(self.human)
            else self._own[index - len(self.human)]
        )

    def standard(self, indices: np.ndarray) -> np.ndarray | None:
        """Return (n,) factors of these sequences' standard terms; None if all are of
        data.path.

        0 for the model's own text. A step's terms are divided by the tokens of all its
        sequences, so those of data.path are scaled up: theirs is a mean over their own
        tokens.
        """
        if not self._own_sequences:
            return None
        return np.where(
            indices < len(self.human),
            self._config.global_batch / self.human_sequences,
            0.0,
        )

    def order(self, step: int) -> np.ndarray:
        """Return (global_batch,) indices of a step's sequences: those of data.path,
        then those of data.own.
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
    """Draw starts and widths of one sequence's windows."""
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
    """Return the objective's layout of sequences; their windows are keyed by (seed,
    index), and drawn by `draw`.

    With objective.mask=noise the windows' rows hold ids that are drawn uniformly below
    `vocabulary`, keyed by (seed, index) and the column: the same in every micro-batch
    and on every rank. `multiple` and `standard` are those of `objective.branch`. Where `standard` is 0 the
    sequence is the model's own text: it ends where generation was stopped, so no draft
    in it predicts EOS.
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
    # Of a branch's rows the columns after the trunk are drawn; of dual's all.
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
    """Return the layout with one id, or one for each offset, in the windows' rows."""
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
        # A run of touching windows may be longer than there are ids: its rest stays
        # standard.
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
    """Return the layout's arrays as tensors on the device, by name, and its trunk."""
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
    """Read one micro-batch, lay it out and move it to the device.

    `standard`, `draw` and `vocabulary` are those of `lay_out`.
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


def trained_on(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a data manifest that a model card has.

    Documents, tokens, documents by layout (plain, chat and the orders of infilling),
    languages with the most tokens first, and the benchmarks that the data is
    decontaminated against, None if not known.
    """
    train = data["train"]
    languages = sorted(
        train["languages"], key=lambda name: -train["languages"][name]["tokens"]
    )
    totals = {name: train[name] for name in ("documents", "tokens", "modes")}
    return {
        **totals,
        "languages": languages,
        "decontaminated": data.get("decontaminated"),
    }


def own_text(config: TrainConfig) -> dict[str, Any]:
    """Return documents and tokens of data.own, and its share of a step's sequences."""
    assert config.data.own is not None
    train = read_manifest(config.data.own, "shards", "data.own")["train"]
    share = config.data.own_sequences(config.global_batch) / config.global_batch
    return {"documents": train["documents"], "tokens": train["tokens"], "share": share}
