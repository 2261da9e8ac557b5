"""What changes while training, as pure functions of the step: learning rate, windows, draft loss."""

import math
from dataclasses import replace

from train.config import ObjectiveConfig, OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate (SDSAT §3.2).

    Linear warm-up to `lr` over `warmup_steps`, then a cosine to `min_lr` at the last step.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def objective_at(step: int, steps: int, objective: ObjectiveConfig) -> ObjectiveConfig:
    """Return the objective of a step: its widest window, and its draft loss.

    With growth=0.4 and L=4 the widest window is 1, 2, 3, 4 in the first four tenths of the steps; with
    ce_share=0.2 the first fifth learns by cross-entropy (total variation starves on cold drafts).
    """
    share = step / steps
    L = objective.L if share >= objective.growth else 1 + int(objective.L * share / objective.growth)
    kind = "ce" if share < objective.ce_share else objective.draft_loss
    return replace(objective, L=L, draft_loss=kind, ce_share=0.0 if kind == "ce" else objective.ce_share)
