"""One rank of the trainings of test_export.py, which also saves the live weights and logits.

    torchrun -m tests.train.export.live_worker FOLDER DATA NAME=OVERRIDE,OVERRIDE ...

The runs share one start of PyTorch and DeepSpeed. Each writes a finished training folder FOLDER/NAME, and
FOLDER/NAME.live with `masters`, the optimizer's float32 weights by name, and with the `logits` (1, n, V) of
the engine's model for `ids` (1, n) after the last step.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import safe_get_full_fp32_param

from conf.runs.stage import collect_provenance
from conf.settings.compose import settings
from tests.train.resume_worker import RECIPE, without_page
from train import engine as engines
from train.__main__ import CHANGEABLE
from train.config import TrainConfig
from train.inputs import read_inputs
from train.spec import read_spec
from train.trainer import Trainer

SHORT = [
    "steps=3",
    "save_every=3",
    "validate_every=3",
    "global_batch=4",
    "optimizer.warmup_steps=1",
]
STAGES = {f"zero{stage}": [f"deepspeed=zero{stage}"] for stage in range(4)}
BFLOAT16 = "dtype=bfloat16"


def train(out: Path, data: Path, overrides: list[str]) -> Trainer:
    """Train a run to its end; return its trainer with the engine, which would be closed."""
    config = settings(
        "train",
        TrainConfig,
        [*RECIPE, *SHORT, f"data.path={data}", f"out={out}", *overrides],
    )
    inputs = read_inputs(config)
    provenance = collect_provenance(config, inputs.folders, CHANGEABLE)
    trainer = Trainer(config, provenance, inputs, read_spec(config, inputs))
    with without_page(), mock.patch.object(engines.Engine, "close"):
        trainer.run()
    return trainer


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """Return gathered copies of the optimizer's float32 weights; frozen weights are the model's."""
    copies = {}
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        groups = zip(
            engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True
        )
        copies = {
            id(weight): copy
            for group in groups
            for weight, copy in zip(*group, strict=True)
        }
    weights = {}
    for name, parameter in engine.module.named_parameters():
        master = (
            safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        )
        with deepspeed.zero.GatheredParameters(
            [parameter], enabled=hasattr(parameter, "ds_id")
        ):
            weight = copies.get(id(parameter), parameter) if master is None else master
            weights[name.removeprefix("lm.")] = weight.detach().float().clone()
    return weights


def report(trainer: Trainer, path: Path) -> None:
    """Save masters and logits of a finished run while its engine still exists."""
    engine = trainer.engine._engine
    ids = torch.from_numpy(trainer.data.human[0].tokens[:96].astype("int64"))[None]
    gate = engine.module._gate
    with (
        torch.no_grad(),
        nullcontext() if gate is None else gate.closed(),  # no id is adaptive
        deepspeed.zero.GatheredParameters(
            list(engine.module.parameters()), enabled=trainer.engine.stage == 3
        ),
    ):
        logits = engine.module.lm.eval()(input_ids=ids, use_cache=False).logits
    value = {"ids": ids, "logits": logits, "masters": masters(engine)}
    if trainer.rank == 0:
        torch.save(value, path)


if __name__ == "__main__":
    folder, data, *runs = sys.argv[1:]
    engines.start()
    for run in runs:
        name, _, overrides = run.partition("=")
        report(
            train(Path(folder) / name, Path(data), overrides.split(",")),
            Path(folder) / f"{name}.live",
        )
