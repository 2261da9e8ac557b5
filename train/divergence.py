"""When a run has come off the road, and what is left for whoever looks into it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from conf.stage import write_json

WINDOW = 50  # steps whose mean loss a step is compared with
SETTLED = 10  # steps that there must be for that


def why_diverged(loss: float, gradient_norm: float, recent: Sequence[float], ratio: float) -> str | None:
    """What is wrong with a step, None for a good one: a loss or a gradient that is not finite, or a
    loss above `ratio` times the mean of the last WINDOW steps', once there are SETTLED.
    """
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(gradient_norm):
        return f"the gradient is not finite at a loss of {loss:.4g}"
    before = recent[-WINDOW:]
    mean = sum(before) / max(len(before), 1)
    if len(before) >= SETTLED and loss > ratio * mean:
        return (
            f"the loss is {loss:.4g}, above {ratio:g} times {mean:.4g}, the mean of {len(before)} steps before"
        )
    return None


def write_diagnostics(out: Path, micro_batches: list[dict[str, Any]], **facts: Any) -> Path:
    """Write `diagnostics.json`: the facts, and every rank's micro-batches. Called by every rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, micro_batches)
    path = out / "diagnostics.json"
    if dist.get_rank() == 0:
        write_json(path, facts | {"micro_batches_by_rank": gathered})
    return path
