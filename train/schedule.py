"""Compute the number of steps of a run, from the times of its parts, and its learning rate.

A run takes `steps` steps, or about `minutes` minutes. With minutes, the number of steps is
planned once, after two fifths of the time, from the median time of the later half of the
steps so far: steps of the first epoch are slower, because they compute the trunks. The number
is written to planned.json and never changes. The learning rate before that does not depend on
it, and a resumed run reads it. So a resumed run has the same result as an uninterrupted run.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from conf.runs.files import read_result, with_checksum, write_json
from train.config import PLANNED, OptimizerConfig

PLAN_AT = 0.4  # share of the minutes after which the steps are planned
MIN_STEPS = 3  # fewest steps to plan from, because the first step is slower


class Schedule(NamedTuple):
    """The number of steps of a run, None until it is planned, and the step at which it was planned."""

    steps: int | None
    planned_at: int = 0


class Clock:
    """Measures the time of the parts of a run, by name.

    `before` is the time in seconds that earlier processes of the run took.
    """

    def __init__(self, before: float = 0.0) -> None:
        self._start = time.monotonic() - before
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def elapsed(self) -> float:
        """Return the seconds that the run has taken, in all its processes."""
        return time.monotonic() - self._start

    def last(self, part: str) -> float:
        """Return the seconds of the last run of a part; 0 if it has not run."""
        return self.seconds[part][-1] if self.seconds[part] else 0.0

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Measure the time of the enclosed block and add it to a part of the run."""
        start = time.monotonic()
        yield
        self.seconds[part].append(time.monotonic() - start)


def learning_rate(step: int, schedule: Schedule, config: OptimizerConfig) -> float:
    """Return the learning rate of a step, counted from 0 (SDSAT §3.2).

    It rises linearly to `lr` over `warmup_steps`, then falls by a cosine to `min_lr` at the
    last step. If the number of steps was planned, the cosine begins at that step.
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
    """Return the schedule of a run that has taken `step` steps; without steps if it is too early.

    All times are in seconds: `seconds` of each step so far, `elapsed` since the start,
    `total` of the run, and `between` of validations and checkpoints per step.
    """
    if elapsed < PLAN_AT * total or len(seconds) < MIN_STEPS:
        return Schedule(None)
    each = median(seconds[len(seconds) // 2 :]) + between
    return Schedule(step + max(1, int((total - elapsed) / each)), step)


def read_planned(out: str | Path) -> Schedule | None:
    """Return the planned schedule in a run's folder, or None."""
    path = Path(out) / PLANNED
    if not path.is_file():
        return None
    planned = read_result(path)
    return Schedule(planned["steps"], planned["planned_at"])


def write_planned(out: Path, schedule: Schedule) -> None:
    """Write a planned schedule to a run's folder."""
    write_json(out / PLANNED, with_checksum(schedule._asdict()))
