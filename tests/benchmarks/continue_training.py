"""Continue the training of an exported adapter, with new text and a schedule of its own.

    torchrun --nproc_per_node 2 -m tests.benchmarks.continue_training ADAPTER_DIR
        SETTING=VALUE ... [--minutes M]

The settings are those of `python -m train`; lora.rank and lora.alpha must be the adapter's. (A
checkpoint of train continues with its own data and schedule alone.) With --minutes the first
steps are timed, and as many follow as fit. Muon updates all matrices of a shape at once here:
on a GPU its launches take as long as a small model's forward. The adapter in adapters/ was
trained so.
"""

import argparse
import runpy
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import _muon

from data_prep.vocab import Vocab
from train import trainer
from train.config import TrainConfig
from train.head import FILE
from train.lora import ADAPTER, PEFT, adapter_weights
from train.model import AdaptiveLM, assemble

UNTIMED, TIMED = 10, 20  # first steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--minutes", type=float)
    args, sys.argv[1:] = parser.parse_known_args()

    def from_adapter(config: TrainConfig, vocab: Vocab) -> tuple[AdaptiveLM, int]:
        module, parameters = assemble(config, vocab)
        names = adapter_weights(module.lm.state_dict())
        own = {name.replace(f".{ADAPTER}", ""): name for name in names}
        tensors = load_file(args.adapter / SAFETENSORS_WEIGHTS_NAME)
        adapter = {own.pop(name.removeprefix(PEFT)): tensors[name] for name in tensors}
        assert not own, (
            f"{args.adapter} must have all of the adapter, got no {min(own)}"
        )
        module.lm.load_state_dict(adapter, strict=False)
        if module.head is not None:
            module.head.load_state_dict(load_file(args.adapter / FILE))
        return module, parameters

    step = trainer.Trainer.train_step
    ends: list[float] = []

    def timed_step(self: trainer.Trainer) -> dict[str, float]:
        metrics = step(self)
        ends.append(time.monotonic())
        if args.minutes and len(ends) == UNTIMED + TIMED:
            left = 60 * args.minutes - (ends[-1] - ends[0])
            seconds = (ends[-1] - ends[-TIMED - 1]) / TIMED
            self.config.steps = self.step + int(left / seconds)
        return metrics

    with (
        patch.object(trainer, "assemble", from_adapter),
        patch.object(trainer.Trainer, "train_step", timed_step),
        patch.object(_muon, "_single_tensor_muon", muon_by_shape),
    ):
        runpy.run_module("train", run_name="__main__", alter_sys=True)


def muon_by_shape(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str,
    **unused: Any,
) -> None:
    """Compute torch.optim._muon._single_tensor_muon, with Nesterov momentum."""
    a, b, c = ns_coefficients
    torch._foreach_lerp_(buffers, grads, 1 - momentum)
    torch._foreach_lerp_(grads, buffers, momentum)
    torch._foreach_mul_(params, 1 - lr * weight_decay)
    members = defaultdict(list)
    for param, update in zip(params, grads):
        members[param.shape].append((param, update))
    for shape, pairs in members.items():
        x = torch.stack([update for _, update in pairs]).bfloat16()
        tall = shape[0] > shape[1]
        x = x.mT if tall else x
        x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
        for _ in range(ns_steps):
            gram = x @ x.mT
            x = torch.baddbmm(
                x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a
            )
        updates = list((x.mT if tall else x).float().unbind())
        adjusted = _muon._adjust_lr(lr, adjust_lr_fn, shape)
        torch._foreach_add_([param for param, _ in pairs], updates, alpha=-adjusted)


if __name__ == "__main__":
    main()
