"""Validation on held-out sequences: the same sequences and windows each time.

All windows have clean prefixes, as in decoding, whatever the objective. They are those of
a stretch of each sequence, one at every position: decoding with adaptive tokens alone
(SDSAT §2.1) can be replayed along it. Where the text is the model's own greedy text, its
mean acceptance length is that of decoding: `tau_real`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.shards import Shards
from data_prep.vocab import TOKENIZER, Vocab
from train.config import ObjectiveConfig, TrainConfig
from train.data import HELD_OUT, load_batch
from train.distributed import Abandoned
from train.loss import summarise
from train.texts import SHOWN, ReplayedText, replayed_text

REPLAYED = 256  # positions of a sequence that have windows

Forward = Callable[[dict[str, Any]], tuple[Tensor, Tensor, Tensor]]


class Validation:
    """One rank's share of the held-out sequences, which Shards refuses where there are none.

    `vocabulary` is that of `lay_out`: noise is the same in each validation, too.
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
        per_round = config.micro_batch * ranks
        parts = in_rounds(
            config.validate_sequences, available=len(shards), per_round=per_round
        )
        self._count = min(len(shards), parts.size)
        self._parts = parts.reshape(-1, ranks, config.micro_batch)[:, rank]
        # Held-out windows are laid out as branch's, or there are none.
        self._objective = config.objective
        if self._objective.name != "causal":
            self._objective = replace(self._objective, name="branch")
        self._shards = shards
        self._vocab = vocab
        self._device = device
        self._vocabulary = vocabulary
        self._seed = (config.seed, HELD_OUT)
        self._tokenizer = Path(config.data.path) / TOKENIZER

    @torch.no_grad()
    def run(
        self, forward: Forward, *, stop: Callable[[], bool], show: Callable[[str], None]
    ) -> tuple[dict[str, float], list[ReplayedText]]:
        """Return metrics over all ranks, by name, and this rank's first texts.

        `show` receives a line before each batch. Raises Abandoned if `stop` returns
        True: it is called before each batch and must return the same on every rank.
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
                f"validating: {batch_index * self._count // len(self._parts)} of {self._count} sequences"
            )
            batch = load_batch(
                self._shards,
                part,
                self._vocab,
                self._objective,
                seed=self._seed,
                device=self._device,
                draw=stretch,
                vocabulary=self._vocabulary,
            )
            _, tally, predicted = forward(batch)
            total += tally
            hits = predicted == batch["labels"]
            for index, *row in zip(part, batch["offsets"], batch["positions"], hits):
                replayed = replay_loops(*(tensor.cpu().numpy() for tensor in row))
                loops += [accepted for _, accepted in replayed]
                if replayed and len(texts) < SHOWN:
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
    """Return starts and widths of windows at REPLAYED positions in a row."""
    last = max(0, n - REPLAYED)
    first = int(np.random.default_rng(seed).integers(0, last, endpoint=True))
    starts = np.arange(first, min(n, first + REPLAYED))
    return starts, np.full(len(starts), objective.L)


def replay_loops(
    offsets: np.ndarray, positions: np.ndarray, hits: np.ndarray
) -> list[tuple[int, int]]:
    """Return the position and the accepted drafts of each loop of decoding along the text.

    All are (c,) columns with a window at each position: offsets, positions, and whether
    the likeliest token is the text's. A loop that accepts a drafts moves on by a + 2
    tokens: the model's own come before and after them.
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


def in_rounds(sequences: int, *, available: int, per_round: int) -> np.ndarray:
    """Return (rounds, per_round) indices of sequences, at least one round.

    A round that has more sequences than are available has some of them twice.
    """
    rounds = max(1, min(sequences, available) // per_round)
    return np.arange(rounds * per_round).reshape(rounds, per_round) % available
