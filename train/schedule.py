"""How long a run is, and its learning rate.

A run takes `steps` steps, or about `minutes`: then the number is planned once a fifth of
the time has passed, from the median of the later half of the steps so far, written to
planned.json, and never changed. The learning rate until then does not depend on it, and a
resumed run reads it: its result is that of the uninterrupted run.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from conf.runs.files import read_result, with_checksum, write_json
from train.config import PLANNED, OptimizerConfig

PLAN_AT = 0.2  # share of the minutes after which the steps are planned
FEWEST = 3  # steps to plan from; the first is slower


class Schedule(NamedTuple):
    """The number of steps of a run, None until it is planned, and the step at which that happened."""

    steps: int | None
    planned_at: int = 0


def learning_rate(step: int, schedule: Schedule, config: OptimizerConfig) -> float:
    """Return the learning rate (SDSAT §3.2).

    Linear warm-up to `lr` over `warmup_steps`, then a cosine to `min_lr` at the last
    step. The cosine of planned steps begins where they were planned.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    steps, planned_at = schedule
    start = max(config.warmup_steps, planned_at)
    if steps is None or step < start:
        return config.lr
    done = (step - start) / max(1, steps - 1 - start)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (
        1 + math.cos(math.pi * min(1.0, done))
    )


def plan_steps(
    step: int,
    seconds: Sequence[float],
    *,
    elapsed: float,
    total: float,
    between: float = 0.0,
) -> Schedule:
    """Return the schedule of a run that has taken `step` steps, unplanned until it is time.

    `seconds` are those of each step so far, `elapsed` those since the start, `total`
    those of the run, and `between` those of validations and checkpoints for each step.
    """
    if elapsed < PLAN_AT * total or len(seconds) < FEWEST:
        return Schedule(None)
    each = median(seconds[len(seconds) // 2 :]) + between
    return Schedule(step + max(1, int((total - elapsed) / each)), step)


def read_planned(out: str | Path) -> Schedule | None:
    """Return the schedule that a run in the folder `out` has planned, if any."""
    path = Path(out) / PLANNED
    if not path.is_file():
        return None
    planned = read_result(path)
    return Schedule(planned["steps"], planned["planned_at"])


def write_planned(out: Path, schedule: Schedule) -> None:
    """Write a planned schedule into a run's folder."""
    write_json(out / PLANNED, with_checksum(schedule._asdict()))
