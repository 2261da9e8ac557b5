"""What is measured while training: sums by window offset, their means, and how they are told. Knows no run."""

import torch
from torch import Tensor

from train.objective.layout import IGNORE

SHOWN = 10  # offsets whose accuracy a line on the console has


def tally(losses: Tensor, predicted: Tensor, labels: Tensor, offsets: Tensor, *, L: int) -> Tensor:
    """(L + 1, 4) float64 sums by offset 0..L over (r, c) columns, those beyond L left out:
    positions, cross-entropy, correct, and correct with all offsets of the window before.
    """
    correct = predicted == labels
    # Misses from the window's first column to this one: a window's columns are neighbours.
    missed = torch.cumsum(~correct, dim=1)
    column = torch.arange(labels.shape[1], device=labels.device)
    before = torch.where(offsets > 0, column - offsets, column)
    missed = missed - torch.where(before >= 0, missed.gather(1, before.clamp(min=0)), 0)
    accepted = correct & (missed == 0)
    valid = (labels != IGNORE) & (offsets <= L)
    rows = torch.stack([valid.double(), losses.double(), correct.double(), accepted.double()], dim=-1)[valid]
    sums = torch.zeros(L + 1, 4, dtype=torch.float64, device=rows.device)
    return sums.index_add_(0, offsets[valid], rows)


def summarise(tally: torch.Tensor) -> dict[str, float]:
    """Means by offset of a (L + 1, 4) tally: standard_loss, accuracy_j, masked_loss, masked, accepted.

    The first is left out where no standard token has learned: a gated adapter leaves them to the base model.

    `accepted` is the expected length of the drafts that hold, Σ_j P(a_1..a_j all right): what
    greedy decoding with L adaptive tokens accepts per loop where the text is what the model
    itself would write.
    """
    rows = tally.tolist()
    count, loss, correct, _ = rows[0]
    metrics = {"standard_loss": loss / count, "accuracy_0": correct / count} if count else {}
    masked = sum(row[0] for row in rows[1:])
    if masked:
        metrics["masked_loss"] = sum(row[1] for row in rows[1:]) / masked
        metrics["masked"] = masked
        metrics["accepted"] = sum(row[3] / max(row[0], 1) for row in rows[1:])
        for offset, (count, _, correct, _) in enumerate(rows[1:], start=1):
            metrics[f"accuracy_{offset}"] = correct / max(count, 1)
    return metrics


def best(validation: list[dict[str, float]]) -> dict[str, float]:
    """Return the least of each loss and the most of each other metric over the validations."""
    names = [name for name in validation[0] if name.endswith("_loss") or name.startswith("acc")]
    columns = {name: [row[name] for row in validation if name in row] for name in names}
    return {name: min(values) if name.endswith("_loss") else max(values) for name, values in columns.items()}


def describe_step(metrics: dict[str, float]) -> str:
    """A step beside its progress bar, within 80 columns."""
    parts = [f"loss {metrics['standard_loss']:.2f}"] if "standard_loss" in metrics else []
    if "masked_loss" in metrics:
        parts.append(f"masked {metrics['masked_loss']:.2f} drafts {metrics['accepted']:.2f}")
    return " ".join([*parts, f"{metrics['tokens_per_second'] / 1000:.1f}k tok/s"])


def describe_validation(metrics: dict[str, float]) -> str:
    """A validation in one console line."""
    parts = [f"loss {metrics['standard_loss']:.3f}"]
    if "masked_loss" in metrics:
        accuracies = [v for k, v in metrics.items() if k.startswith("accuracy_") and k != "accuracy_0"]
        shown = " ".join(f"{100 * value:.0f}" for value in accuracies[:SHOWN])
        if len(accuracies) > SHOWN:
            shown += f" ... {100 * accuracies[-1]:.0f} (the last of {len(accuracies)})"
        parts.append(f"masked {metrics['masked_loss']:.3f}  accepted {metrics['accepted']:.2f}")
        parts.append(f"accuracy by offset {shown} %")
    return "  ".join(parts)


def describe_change(validation: list[dict[str, float]]) -> str:
    """The held-out figures before and after, in one sentence."""
    before, after = validation[0], validation[-1]
    rise = after["standard_loss"] / before["standard_loss"] - 1
    told = (
        f"held-out standard-token loss {before['standard_loss']:.3f} before, {after['standard_loss']:.3f} "
        f"after ({100 * rise:+.1f} %)"
    )
    if "accepted" in after:
        told += (
            f"; accuracy at window offset 1 {100 * before['accuracy_1']:.1f} % before, "
            f"{100 * after['accuracy_1']:.1f} % after; expected accepted drafts {before['accepted']:.2f} "
            f"before, {after['accepted']:.2f} after"
        )
    return told
