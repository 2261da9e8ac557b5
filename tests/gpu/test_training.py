"""Training on GPUs: kernels, steps of every ZeRO stage on all of them, saving and resuming.

Runs are processes of their own: a kernel that fails leaves a CUDA process unusable.
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

NEAR = 1e-3  # relative difference of two kernels' gradients in float32, at most
SAME = 1e-3  # of the loss after a resume, in bfloat16, whose kernels add up in no fixed order
SHAPE = "deepseek_coder_1b" if DEVICE == "cuda" else "tiny"
TOKENS = 4096 if DEVICE == "cuda" else 64
CHECKPOINT_LAYERS = 4  # a checkpoint of a whole model takes 19 GB


@pytest.mark.skipif(DEVICE == "cpu", reason="flex attention has no gradient on a CPU")
def test_flex_attention_has_the_gradients_of_dense_attention() -> None:
    torch.manual_seed(0)
    lm = LlamaForCausalLM._from_config(
        LlamaConfig(**LIVELY), attn_implementation=register("sdpa")
    ).to(DEVICE)
    batch = random_batch(499, 256, ObjectiveConfig(name="branch"), torch.device(DEVICE))
    results: list[list[Tensor]] = []
    for name in (DENSE, FLEX):
        loss, *_ = AdaptiveLM(lm, chunk=256, L=5, attention=name)(**batch)
        results.append([loss, *torch.autograd.grad(loss, list(lm.parameters()))])
    apart = [float((b - a).norm() / a.norm()) for a, b in zip(*results, strict=True)]
    assert max(apart) < NEAR


@pytest.mark.parametrize("objective", ["dual", "branch"])
@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero3"])
def test_steps_and_resume(
    preset: str, objective: str, tmp_path: Path, show: Any
) -> None:
    """On all GPUs: finite losses, and the same next step after a resume."""
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
    """In float32, where nothing but the order of sums differs."""
    common = ["model=tiny", "objective=branch", "dtype=float32"]
    losses = [
        train(tmp_path, *common, f"deepspeed=zero{stage}")["losses"]
        for stage in (1, 2, 3)
    ]
    show(losses=losses)
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


def train(folder: Path, *overrides: str) -> dict[str, Any]:
    """Return what the worker printed."""
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
