"""Validate on held-out sequences, with the same sequences and windows each time.

All windows have clean prefixes, as in decoding, for every objective. Each position in a
stretch of the sequence has a window, so decoding with adaptive tokens alone (SDSAT §2.1)
can be replayed along the stretch. `tau_real` is the mean acceptance length of the replay.
If the text is the model's own greedy text, greedy decoding has the same acceptance length.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from conf.errors import counted
from data_prep.shards import Shards
from data_prep.vocab import TOKENIZER, Vocab
from train.config import ObjectiveConfig, TrainConfig
from train.data import HELD_OUT, load_batch
from train.distributed import Abandoned
from train.loss import summarise
from train.objective import IGNORE
from train.texts import SHOWN, ReplayedText, replayed_text

REPLAYED = 256  # positions with windows in each sequence

Forward = Callable[[dict[str, Any]], tuple[Tensor, Tensor, Tensor]]


class Validation:
    """One rank's share of the held-out sequences.

    `vocabulary` is passed to `lay_out`; noise is the same in each validation. Raises
    UserError (from Shards) if the data has no held-out sequences.
    """

    def __init__(
        self,
        config: TrainConfig,
        vocab: Vocab,
        *,
        rank: int,
        ranks: int,
        device: torch.device,
        vocabulary: int = 0,
    ) -> None:
        shards = Shards(config.data.path, "held_out")
        self._count = min(config.validate_sequences, len(shards))
        parts = in_rounds(self._count, per_round=config.micro_batch * ranks)
        self._parts = parts.reshape(-1, ranks, config.micro_batch)[:, rank]
        # Windows are laid out as branches for every objective; causal has no windows.
        self._objective = config.objective
        if self._objective.name != "causal":
            self._objective = replace(self._objective, name="branch")
        self._shards = shards
        self._vocab = vocab
        self._device = device
        self._vocabulary = vocabulary
        self._seed = (config.seed, HELD_OUT)
        self._tokenizer = Path(config.data.path) / TOKENIZER
        # Every rank must validate its sequences, but only rank 0 logs texts and decodes them.
        self._shown = SHOWN if rank == 0 else 0

    @torch.no_grad()
    def run(
        self, forward: Forward, *, stop: Callable[[], bool], show: Callable[[str], None]
    ) -> tuple[dict[str, float], list[ReplayedText]]:
        """Return metrics over all ranks by name, and the first few texts of rank 0.

        `show` is called with a progress line before each batch. Raises Abandoned if
        `stop` returns True; it is called before each batch and must return the same value
        on every rank.
        """
        total = torch.zeros(
            self._objective.L + 1, 4, dtype=torch.float64, device=self._device
        )
        loops: list[int] = []
        texts: list[ReplayedText] = []
        for batch_index, part in enumerate(self._parts):
            if stop():
                raise Abandoned
            show(
                f"validating: {batch_index * self._count // len(self._parts)} of "
                f"{counted(self._count, 'sequence')}"
            )
            batch = load_batch(
                self._shards,
                np.maximum(part, 0),
                self._vocab,
                self._objective,
                seed=self._seed,
                device=self._device,
                draw=stretch,
                vocabulary=self._vocabulary,
            )
            batch["labels"][torch.from_numpy(part < 0).to(self._device)] = IGNORE
            _, tally, predicted = forward(batch)
            total += tally
            hits = predicted == batch["labels"]
            for index, *row in zip(part, batch["offsets"], batch["positions"], hits):
                if index < 0:
                    continue
                replayed = replay_loops(*(tensor.cpu().numpy() for tensor in row))
                loops += [accepted for _, accepted in replayed]
                if replayed and len(texts) < self._shown:
                    tokens = self._shards[int(index)].tokens
                    text = replayed_text(int(index), tokens, replayed, self._tokenizer)
                    texts.append(text)
        dist.all_reduce(total)
        verified = torch.tensor([len(loops), sum(loops)], device=self._device)
        dist.all_reduce(verified)
        metrics = {"sequences": self._count} | summarise(total)
        if verified[0]:
            metrics["tau_real"] = 1 + float(verified[1] / verified[0])
        return metrics, texts


def stretch(
    n: int, objective: ObjectiveConfig, seed: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and widths of windows at REPLAYED consecutive positions."""
    last = max(0, n - REPLAYED)
    first = int(np.random.default_rng(seed).integers(0, last, endpoint=True))
    starts = np.arange(first, min(n, first + REPLAYED))
    return starts, np.full(len(starts), objective.L)


def replay_loops(
    offsets: np.ndarray, positions: np.ndarray, hits: np.ndarray
) -> list[tuple[int, int]]:
    """Return (position, accepted drafts) of each decoding loop replayed along the text.

    All arguments are (c,): offsets, positions, and whether the most likely token equals
    the text's. Each position has a window. A loop that accepts `a` drafts advances by
    a + 2 tokens: the model's own token before the drafts and the one after them.
    """
    right = np.append(hits * offsets, 0)
    accepted = []
    end = 0
    for column in np.flatnonzero(offsets == 1):
        if positions[column] >= end:
            a = 0
            while right[column + a] == a + 1:
                a += 1
            accepted.append((int(positions[column]), a))
            end = positions[column] + a + 2
    return accepted


def in_rounds(sequences: int, *, per_round: int) -> np.ndarray:
    """Return (rounds, per_round) indices of sequences; -1 fills the last round.

    Each rank must take part in each forward, so it computes a sequence that is not counted.
    """
    rounds = -(-sequences // per_round)
    indices = np.arange(rounds * per_round)
    indices[sequences:] = -1
    return indices.reshape(rounds, per_round)
