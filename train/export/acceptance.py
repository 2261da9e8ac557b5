"""The last validation measured again, on the model that was read back: what was learned is what is served.

The same held-out sequences, windows and layout; a sequence by itself at a time. Knows models and shards;
knows no checkpoint.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf import UserError
from data_prep.shards import Shards
from train.data import load_batch
from train.export.trained import Trained
from train.lm import AdaptiveLM
from train.metrics import summarise
from train.validation import laid_out, validated, window_seed

LEVEL = 0.95
CHUNK = 256  # positions whose logits exist at once
WORK = {"cpu": 2e13, "cuda": 1e17}  # FLOP: a few minutes of either
FEWEST = 4  # sequences, however long they take


@dataclass(frozen=True)
class Measured:
    """Means of metrics on some sequences, and their intervals of 95 %, by name."""

    sequences: int
    means: dict[str, float]
    intervals: dict[str, tuple[float, float]]


def count_sequences(trained: Trained, shards: Shards, wanted: int | None, device: torch.device) -> int:
    """How many of the validation's sequences are measured: as many as wanted, or as a few minutes allow.

    A token costs 2 FLOP per parameter, and about one adaptive token is laid out beside it.
    """
    settings = trained.manifest["settings"]
    per_round = settings["micro_batch"] * trained.manifest["ranks"]
    every = validated(settings["validate_sequences"], available=len(shards), per_round=per_round)
    if wanted is None:
        work = 4 * trained.manifest["parameters"] * shards[0].tokens.size
        wanted = max(int(WORK[device.type] / work), FEWEST)
    return min(wanted, every)


@torch.no_grad()
def measure(
    module: AdaptiveLM, trained: Trained, shards: Shards, *, count: int, device: torch.device
) -> Measured:
    """The metrics of the first `count` held-out sequences."""
    objective, seed = laid_out(trained.objective), window_seed(trained.manifest["settings"]["seed"])
    tallies = []
    for sequence in range(count):
        batch: dict[str, Any] = load_batch(
            shards, np.array([sequence]), trained.vocab, objective, seed=seed, device=device
        )
        tallies.append(module(**batch)[1].cpu())
    return summarise_clusters(torch.stack(tallies))


def summarise_clusters(tallies: Tensor) -> Measured:
    """Metrics of (n, L + 1, 4) tallies of n sequences.

    Positions of a sequence depend on each other, so the sequence is what chance draws: the jackknife
    leaves out one after another, and Student's t with n - 1 degrees of freedom makes an interval of its
    standard error (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, ch. 11). Of n positions none
    or all of which are right, up to 3 / n might be otherwise (Hanley and Lippman-Hand, JAMA 1983): no share's
    interval is narrower.
    """
    n, total = len(tallies), tallies.sum(0)
    means = summarise(total)
    without = [summarise(total - tally) for tally in tallies]
    resolution = (3 / total[:, 0].clamp(min=1)).tolist()
    least = {f"accuracy_{offset}": share for offset, share in enumerate(resolution)}
    least["accepted"] = sum(resolution[1:])
    intervals = {}
    for name in (name for name in means if name != "masked"):  # which counts positions
        values = np.array([metrics.get(name, means[name]) for metrics in without])
        half = student(LEVEL, n - 1) * math.sqrt((n - 1) / n * ((values - values.mean()) ** 2).sum())
        half = max(half, least.get(name, 0.0))
        intervals[name] = (means[name] - half, means[name] + half)
    return Measured(n, means, intervals)


def student(level: float, freedom: int) -> float:
    """Half the width of the central interval of Student's t, by its expansion about the normal
    distribution's (Abramowitz and Stegun, 26.7.5); infinite for 0 degrees of freedom.
    """
    if freedom == 0:
        return math.inf
    z = NormalDist().inv_cdf((1 + level) / 2)
    terms = [
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    ]
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def check_acceptance(measured: Measured, validation: Mapping[str, float]) -> None:
    """Raises UserError when a metric of the validation lies outside what was measured allows.

    All intervals hold together at 95 %: each is widened to the level that m metrics need for that
    (Bonferroni).
    """
    wider = student(1 - (1 - LEVEL) / len(measured.intervals), measured.sequences - 1)
    wider /= student(LEVEL, measured.sequences - 1)
    for name, (low, high) in measured.intervals.items():
        mean = measured.means[name]
        if not abs(validation[name] - mean) <= wider * (high - low) / 2:
            raise UserError(
                f"verify: wanted {name}={validation[name]:.4f} as in the last validation, found {mean:.4f} "
                f"(95 % interval {low:.4f} to {high:.4f}) on {measured.sequences} held-out sequences "
                "with the model read back; nothing is written, verify=false would"
            )
