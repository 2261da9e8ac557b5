"""The last validation measured again, on the model that was read back: what was learned is what is served.

The same held-out sequences, windows and layout; a sequence by itself at a time. What the adaptive tokens answer
in some of these windows is read off the same pass, for train.export.ngram_weights. Knows models and shards;
knows no checkpoint.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from conf import UserError
from data_prep.shards import PackedSequence, Shards
from train.data import load_batch
from train.export.trained import Trained
from train.metrics import summarise
from train.model import AdaptiveLM
from train.validation import laid_out, validated, window_seed

LEVEL = 0.95
CHUNK = 256  # positions whose logits exist at once
SPEED = {"cpu": 1e11, "cuda": 3e14}  # FLOP/s, roughly, of a small machine
READ = 2e9  # bytes/s of a disk, roughly
SECONDS = 200  # of measuring, unless a setting says on how many sequences
FEWEST = 4  # sequences, however long they take
ANSWERS = 16  # likeliest tokens of an adaptive token, as many as decoding reads
WINDOWS, TEXTS = 4096, 64  # windows, and sequences with them, whose answers are read at most
# How far a mean on the same sequences may lie off by rounding, by other kernels or in another type: a share of
# itself, which all positions may have in common, and DEVIATIONS of what each has by itself. Measured with the
# demo in three types: 0.00014 of a loss, and 3 of 1,905 drafts; rope_theta times 1.5 changes a loss by 0.0023.
LOSS_SHARE, LOSS_NOISE = 0.001, 0.02  # nats of a position
RIGHT_SHARE, NEAR_TIES = 0.01, 0.01  # of all positions: those whose likeliest token another rounding may change
DEVIATIONS = 4


@dataclass(frozen=True)
class Measured:
    """Means of metrics on some sequences, their intervals of 95 %, and what rounding may change, by name.

    One sequence has no intervals.
    """

    sequences: int
    means: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    roundings: dict[str, float]


@dataclass(frozen=True)
class Window:
    """The answers of adaptive tokens behind a text, and the model's own choices there, as decoding meets them.

    `document[root]` is the token that is verified with the drafts, the first that the adaptive tokens do not
    see. `choices` (w,) are what the model chooses behind it, each after the text before: all but the last are
    the text's own tokens. `ids` and `shares` are (w, m) by place, the likeliest first.
    """

    sequence: int
    document: Sequence[int]
    root: int
    choices: list[int]
    ids: list[list[int]]
    shares: list[list[float]]


def count_sequences(
    trained: Trained, shards: Shards, wanted: int | None, device: torch.device
) -> tuple[int, int]:
    """How many of the validation's sequences are measured, as many as wanted or as SECONDS allow, and how many
    there are.
    """
    settings = trained.manifest["settings"]
    per_round = settings["micro_batch"] * trained.manifest["ranks"]
    every = validated(settings["validate_sequences"], available=len(shards), per_round=per_round)
    if wanted is None:
        wanted = max(int(SECONDS / _seconds(trained, shards, device)), FEWEST)
    return min(wanted, every), every


def announce(trained: Trained, shards: Shards, *, count: int, every: int, device: torch.device) -> str:
    """What is going to be measured, and how long that takes where it is long, in one sentence."""
    told = f"measuring acceptance again on {count} of {every} held-out sequences"
    seconds = count * _seconds(trained, shards, device)
    if seconds <= 2 * SECONDS:
        return told
    rates = f"{SPEED[device.type] / 1e12:g} TFLOP/s on the {device.type} and {READ / 1e9:g} GB/s from the disk"
    return (
        f"{told}: about {seconds / 3600:.1f} hours at {rates}; verify_sequences=2 is the least, verify=false "
        "leaves it out"
    )


def _seconds(trained: Trained, shards: Shards, device: torch.device) -> float:
    """For one sequence, roughly: a token costs 2 FLOP per parameter, and about one adaptive token is laid out
    beside it; all weights are read from the disk, in float32.
    """
    parameters = int(trained.manifest["parameters"])
    return 4 * parameters * (shards[0].tokens.size / SPEED[device.type] + 1 / READ)


@torch.no_grad()
def measure(
    module: AdaptiveLM, trained: Trained, shards: Shards, *, count: int, device: torch.device
) -> tuple[Measured, list[Window]]:
    """Return the metrics of the first `count` held-out sequences, and windows of some of these.

    The windows are chosen by even strides: up to WINDOWS of up to TEXTS sequences.
    """
    objective, seed = laid_out(trained.objective), window_seed(trained.manifest["settings"]["seed"])
    head, every = module.lm.get_output_embeddings(), -(-count // TEXTS)
    most = WINDOWS // len(range(0, count, every))
    tallies, windows = [], list[Window]()
    for index in range(count):
        batch: dict[str, Any] = load_batch(
            shards, np.array([index]), trained.vocab, objective, seed=seed, device=device
        )
        hidden = module.encode(batch["ids"], batch["offsets"], batch["positions"], batch["trunk"])
        rest = (batch[name] for name in ("labels", "offsets", "weights", "teachers"))
        _, tally, predicted = module.score(hidden, *rest)
        tallies.append(tally.cpu())
        if index % every == 0:
            offsets, positions = (batch[name][0].cpu().numpy() for name in ("offsets", "positions"))
            chosen = choose_windows(offsets, positions, most=most)
            windows += read_windows(index, shards[index], chosen, predicted[0].cpu().numpy(), hidden[0], head)
    return summarise_clusters(torch.stack(tallies)), windows


def choose_windows(offsets: np.ndarray, positions: np.ndarray, *, most: int) -> list[tuple[int, np.ndarray]]:
    """Return the roots and the columns of up to `most` windows of a (c,) layout, chosen by an even stride.

    offsets     0 0 0 1 2 1 1 2 3    windows   1: (3 4), 0: (5), 2: (6 7 8)
    positions   0 1 2 1 2 0 2 3 4
    """
    columns = np.flatnonzero(offsets)
    windows = np.split(columns, np.flatnonzero(offsets[columns] == 1)[1:]) if len(columns) else []
    count = min(most, len(windows))
    chosen = (windows[i * len(windows) // count] for i in range(count))
    return [(int(positions[window[0]]), window) for window in chosen]


def read_windows(
    index: int,
    sequence: PackedSequence,
    windows: Sequence[tuple[int, np.ndarray]],
    predicted: np.ndarray,
    hidden: Tensor,
    head: nn.Linear,
) -> Iterator[Window]:
    """Yield windows of a sequence, from their roots and columns, (c,) predictions and (c, d) hidden states."""
    documents, texts = sequence.documents, dict[int, tuple[int, list[int]]]()
    for root, columns in windows:
        choices = predicted[root : root + len(columns)]
        own = np.logical_and.accumulate(choices == sequence.tokens[root + 1 : root + 1 + len(columns)])
        known = min(len(columns), int(own.sum()) + 1)
        # Not head(rows): an offloaded head would drop its weights, which `resident` holds.
        logits = linear(hidden[columns[:known]], head.weight, head.bias).float()
        values, ids = logits.topk(min(ANSWERS, logits.shape[-1]))
        document = documents[root]
        if document not in texts:
            places = np.flatnonzero(documents == document)
            texts[document] = int(places[0]), sequence.tokens[places].tolist()
        first, text = texts[document]
        yield Window(
            index, text, root - first, choices[:known].tolist(), ids.tolist(), values.softmax(-1).tolist()
        )


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
    without = [summarise(total - tally) for tally in tallies] if n > 1 else []
    least = _of_shares(3 / total[:, 0].clamp(min=1))
    intervals = {}
    for name in _compared(means) if n > 1 else ():
        values = np.array([metrics.get(name, means[name]) for metrics in without])
        half = student(LEVEL, n - 1) * math.sqrt((n - 1) / n * ((values - values.mean()) ** 2).sum())
        half = max(half, least.get(name, 0.0))
        intervals[name] = (means[name] - half, means[name] + half)
    return Measured(n, means, intervals, _roundings(total, means, least))


def _roundings(total: Tensor, means: Mapping[str, float], least: Mapping[str, float]) -> dict[str, float]:
    """What rounding may change of each mean of a (L + 1, 4) tally; of right tokens no less than `least`."""
    counts = total[:, 0].clamp(min=1)
    flips = _of_shares(DEVIATIONS * (NEAR_TIES / counts).sqrt())
    found = {}
    for name in _compared(means):
        if name in flips:
            found[name] = RIGHT_SHARE * means[name] + max(flips[name], least[name])
        else:
            count = float(counts[0] if name == "standard_loss" else counts[1:].sum())
            found[name] = LOSS_SHARE * means[name] + DEVIATIONS * LOSS_NOISE / math.sqrt(count)
    return found


def _compared(means: Mapping[str, float]) -> list[str]:
    return [name for name in means if name != "masked"]  # which counts positions


def _of_shares(by_offset: Tensor) -> dict[str, float]:
    """(L + 1) uncertainties of the shares of right tokens by metric: `accepted` sums those of the offsets."""
    shares = by_offset.tolist()
    found = {f"accuracy_{offset}": share for offset, share in enumerate(shares)}
    return {**found, "accepted": sum(shares[1:])}


def student(level: float, freedom: int) -> float:
    """Half the width of the central interval of Student's t with `freedom` >= 1 degrees of freedom.

    Its probability is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4), which is inverted by bisection.
    """
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """The probability that |t| < tan(angle) * sqrt(freedom)."""
    sine, cosine, odd = math.sin(angle), math.cos(angle), freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * power / (power + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def check_acceptance(measured: Measured, validation: Mapping[str, float], *, every: int) -> None:
    """Raises UserError when a metric of the validation, which was on `every` sequences, lies outside of what
    was measured on the first of them allows.

    What was measured on all of them differs by rounding alone. Of fewer, chance drew those n of N: the
    intervals are narrower by sqrt(1 - n / N) (Cochran, Sampling Techniques, 1977, 2.6) and hold together at
    95 %, each widened to the level that m metrics need for that (Bonferroni).
    """
    n = measured.sequences
    for name in _compared(measured.means):
        mean, allowed = measured.means[name], measured.roundings[name]
        if n < every:
            low, high = measured.intervals[name]
            wider = student(1 - (1 - LEVEL) / len(measured.intervals), n - 1) / student(LEVEL, n - 1)
            allowed += wider * math.sqrt(1 - n / every) * (high - low) / 2
        if not abs(validation[name] - mean) <= allowed:  # which nothing is that is no number
            raise UserError(
                f"verify: wanted {name}={validation[name]:.4f} as in the last validation, within "
                f"{allowed:.4f}, found {mean:.4f} on {n} of its {every} held-out sequences with the model read "
                "back; nothing is written, verify=false would"
            )
