"""Validation on held-out sequences, laid out as decoding meets them: every window on a clean prefix.

Whatever the objective, so that figures of all of them compare. The same sequences and windows
every time. Knows batches and their measures; knows no schedule and no tracking.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from conf import UserError
from conf.errors import TOKENIZING
from data_prep.shards import Shards
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer
from train.config import ObjectiveConfig, TrainConfig
from train.data import HELD_OUT, load_batch
from train.monitor.drafts import Row, sample_drafts
from train.monitor.metrics import summarise

DRAFTS = 8  # windows that are shown as text

Forward = Callable[[dict[str, Any]], tuple[Tensor, Tensor, Tensor]]


class Validation:
    """One rank's share of the held-out sequences. Raises UserError when they are too few for all ranks."""

    def __init__(
        self, config: TrainConfig, vocab: Vocab, *, rank: int, ranks: int, device: torch.device
    ) -> None:
        shards = Shards(config.data.path, "held_out")
        per_round = config.micro_batch * ranks
        count = validated(config.validate_sequences, available=len(shards), per_round=per_round)
        self._parts = np.arange(count).reshape(-1, ranks, config.micro_batch)[:, rank]
        self._objective = laid_out(config.objective)
        self._shards, self._vocab, self._device = shards, vocab, device
        self._seed = window_seed(config.seed)
        self._decode = TOKENIZING(load_tokenizer(Path(config.data.path) / TOKENIZER).decode)

    @torch.no_grad()
    def run(self, forward: Forward) -> tuple[dict[str, float], list[Row]]:
        """Metrics over all ranks, by name, and this rank's sample drafts (train.monitor.drafts)."""
        total = torch.zeros(self._objective.L + 1, 4, dtype=torch.float64, device=self._device)
        drafts: list[Row] = []
        for part in self._parts:
            batch = load_batch(
                self._shards, part, self._vocab, self._objective, seed=self._seed, device=self._device
            )
            _, tally, predicted = forward(batch)
            total += tally
            drafts = drafts or sample_drafts(batch, predicted, count=DRAFTS, decode=self._decode)
        dist.all_reduce(total)
        return summarise(total), drafts


def validated(wanted: int, *, available: int, per_round: int) -> int:
    """How many held-out sequences, the first ones, are validated on: whole rounds of micro_batch x ranks.

    Raises UserError when they make no round.
    """
    count = min(wanted, available)
    if count < per_round:
        raise UserError(
            f"validate_sequences: wanted at least micro_batch x ranks = {per_round} held-out sequences, "
            f"found {count}"
        )
    return count // per_round * per_round


def window_seed(seed: int) -> tuple[int, int]:
    """What windows of held-out sequences are drawn with, in a run of this seed."""
    return seed, HELD_OUT


def laid_out(objective: ObjectiveConfig) -> ObjectiveConfig:
    """The objective that shows held-out windows as decoding meets them."""
    if objective.name == "causal":
        return objective
    return replace(objective, name="branch", retention=1.0, wide_share=0.0)
