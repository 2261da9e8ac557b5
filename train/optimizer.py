"""The optimizer: AdamW for all that is trained, or Muon for its matrices.

Muon's update of a matrix is its gradient's momentum with all singular values near 1, by
Newton-Schulz iterations (arXiv 2502.16982). It is scaled to AdamW's usual size,
0.2 sqrt(max(rows, columns)) times the learning rate.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from train.config import OptimizerConfig


def parameter_groups(
    module: nn.Module, config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return the trained parameters; norms, biases and embeddings have no weight decay.

    `rate` is a group's learning rate as a multiple of the schedule's. Muon is for
    matrices alone.
    """
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    # peft's name for single rows of an embedding
    rows = {
        id(p) for name, p in module.named_parameters() if "trainable_tokens" in name
    }
    trained = [p for p in module.parameters() if p.requires_grad]
    # ZeRO 3 flattens a weight and stores its shape elsewhere.
    matrices = {id(p) for p in trained if len(getattr(p, "ds_shape", p.shape)) >= 2}
    matrices -= embeddings | rows
    decayed = [p for p in trained if id(p) in matrices]
    adaptive = [p for p in trained if id(p) in rows]
    plain = [p for p in trained if id(p) not in matrices | rows]
    groups = [
        (decayed, config.weight_decay, 1.0, config.name == "muon"),
        (plain, 0.0, 1.0, False),
        (adaptive, 0.0, config.rows_rate, False),
    ]
    return [
        {"params": params, "weight_decay": decay, "rate": rate, "muon": muon}
        for params, decay, rate, muon in groups
        if params
    ]


def build_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return the optimizer of `parameter_groups`."""
    betas = config.beta1, config.beta2
    if config.name == "muon":
        return MuonAdamW(groups, config.lr, betas)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for groups with `muon`, AdamW for the others, with one state.

    DeepSpeed and checkpoints know one optimizer.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]
    ) -> None:
        matrices = [group for group in groups if group["muon"]]
        others = [group for group in groups if not group["muon"]]
        self._parts: dict[bool, torch.optim.Optimizer] = {}
        if matrices:
            self._parts[True] = torch.optim.Muon(
                matrices, lr=lr, adjust_lr_fn="match_rms_adamw"
            )
        if others:
            self._parts[False] = torch.optim.AdamW(
                others, lr=lr, betas=betas, fused=True
            )
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step of both; `closure` is not called."""
        for muon, part in self._parts.items():
            # Loading a state replaces them.
            part.param_groups = [g for g in self.param_groups if g["muon"] == muon]
            part.state = self.state
            part.step()
