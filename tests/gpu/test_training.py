"""Test training on all GPUs: attention kernels, steps of every ZeRO stage, saving and resuming.

Each run is a process of its own, because a failed kernel leaves a CUDA process unusable.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.gpu.shapes import DEVICE, LIVELY, RANKS
from tests.gpu.training_worker import random_batch
from train.attention import DENSE, FLEX, register
from train.config import ObjectiveConfig
from train.model import AdaptiveLM

NEAR = 1e-3  # largest relative difference of two kernels' gradients in float32
# Largest relative difference of the loss after a resume in bfloat16: its kernels add up in no
# fixed order.
SAME = 1e-3
SHAPE = "deepseek_coder_1b" if DEVICE == "cuda" else "tiny"
TOKENS = 4096 if DEVICE == "cuda" else 64
CHECKPOINT_LAYERS = 4  # a checkpoint of all layers takes 19 GB


@pytest.mark.skipif(DEVICE == "cpu", reason="flex attention has no gradient on a CPU")
def test_flex_and_dense_attention_have_equal_gradients() -> None:
    torch.manual_seed(0)
    lm = LlamaForCausalLM._from_config(
        LlamaConfig(**LIVELY), attn_implementation=register("sdpa")
    ).to(DEVICE)
    batch = random_batch(499, 256, ObjectiveConfig(name="branch"), torch.device(DEVICE))
    results: list[list[Tensor]] = []
    for name in (DENSE, FLEX):
        loss, *_ = AdaptiveLM(lm, chunk=256, L=5, attention=name)(**batch)
        results.append([loss, *torch.autograd.grad(loss, list(lm.parameters()))])
    errors = [float((b - a).norm() / a.norm()) for a, b in zip(*results, strict=True)]
    assert max(errors) < NEAR


@pytest.mark.parametrize("objective", ["dual", "branch"])
@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero3"])
def test_steps_and_resume(
    preset: str, objective: str, tmp_path: Path, show: Any
) -> None:
    """Losses must be finite, and the next step after a resume must have the same loss."""
    layers = (
        [f"model.shape.num_hidden_layers={CHECKPOINT_LAYERS}"]
        if DEVICE == "cuda"
        else []
    )
    overrides = [
        f"model={SHAPE}",
        f"objective={objective}",
        f"deepspeed={preset}",
        "dtype=bfloat16",
        *layers,
    ]
    figures = train(tmp_path, *overrides)
    show(**figures)
    assert all(map(math.isfinite, [*figures["losses"], figures["gradient_norm"]]))
    assert abs(figures["resumed_loss"] / figures["next_loss"] - 1) < SAME


def test_zero_stages_agree(tmp_path: Path, show: Any) -> None:
    """In float32, ZeRO stages differ only by the order of sums."""
    common = ["model=tiny", "objective=branch", "dtype=float32"]
    losses = [
        train(tmp_path, *common, f"deepspeed=zero{stage}")["losses"]
        for stage in (1, 2, 3)
    ]
    show(losses=losses)
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


def train(folder: Path, *overrides: str) -> dict[str, Any]:
    """Run the worker on all devices; return its figures."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={RANKS}",
    ]
    command += ["-m", "tests.gpu.training_worker", str(folder), str(TOKENS), *overrides]
    cpu = (
        {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if DEVICE == "cpu" else {}
    )
    run = subprocess.run(command, env=os.environ | cpu, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])
