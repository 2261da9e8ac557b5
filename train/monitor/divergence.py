"""When a run has come off the road. Pure."""

import math
from collections.abc import Sequence

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
