"""One part of train.gpu_check: `python -m train.gpu_check_parts NAME SETTINGS` (as JSON).

Each part returns its figures, and in "passed" whether they are right.
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from conf import settings
from data_prep.shards import SPAN, PackedSequence
from data_prep.vocab import Vocab
from train.attention import DENSE, FLEX, branch_kernel, register
from train.config import ObjectiveConfig, TrainConfig
from train.data import COLUMNS, CUDA_COLUMNS, lay_out, to_tensors
from train.engine import Engine, start
from train.flops import peak_flops, step_flops
from train.gpu_check import MARK, TrainCheckConfig
from train.memory import estimate_memory
from train.model import AdaptiveLM, assemble
from train.pretrained import model_config

NEAR = 1e-3  # relative difference of two kernels' gradients in float32, at most
SAME = 1e-3  # of the loss after a resume, in bfloat16, whose kernels add up in no fixed order
LAYERS = 2  # of the model that is saved and resumed: a checkpoint of a whole one takes 19 GB


def attention(config: TrainCheckConfig) -> dict[str, Any]:
    """Compare loss and gradients of `branch` by flex attention with those by dense attention, in float32."""
    shape = LlamaConfig(
        vocab_size=499,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.2,
    )
    heads = {"heads": 8, "kv_heads": 4, "width": 16, "dropout": 0.0}
    kernel = branch_kernel("auto", config.device, torch.float32, **heads)
    if config.device == "cpu":
        why = "not run: flex attention has no gradient on a CPU"
        return {"kernel": kernel, "loss_apart": why, "gradients_apart": why, "passed": True}
    torch.manual_seed(0)
    lm = LlamaForCausalLM._from_config(shape, attn_implementation=register("sdpa")).to(config.device)
    batch = random_batch(499, 256, ObjectiveConfig(name="branch"), torch.device(config.device))
    results: list[list[Tensor]] = []
    for name in (DENSE, FLEX):
        loss, *_ = AdaptiveLM(lm, chunk=256, L=5, attention=name)(**batch)
        results.append([loss, *torch.autograd.grad(loss, list(lm.parameters()))])
    apart = [float((b - a).norm() / a.norm()) for a, b in zip(*results, strict=True)]
    return {
        "kernel": kernel,
        "loss_apart": apart[0],
        "gradients_apart": max(apart[1:]),
        "passed": max(apart) < NEAR,
    }


def optimizer(config: TrainCheckConfig) -> dict[str, Any]:
    """Compare a step of fused AdamW with one of the plain loop, in float32."""
    generator = torch.Generator().manual_seed(0)
    values, gradient = (torch.randn(1 << 20, generator=generator) for _ in range(2))
    stepped = []
    for fused in (False, True):
        weight = values.to(config.device).requires_grad_()
        weight.grad = gradient.to(config.device)
        torch.optim.AdamW([weight], lr=1e-2, foreach=False, fused=fused).step()
        stepped.append(weight.detach())
    apart = float((stepped[1] - stepped[0]).abs().max())
    return {"weights_apart": apart, "passed": apart < 1e-6}


class Steps:
    """Training steps on random weights and tokens, one sequence a step, under ZeRO 1."""

    def __init__(self, objective: str, config: TrainCheckConfig, *overrides: str) -> None:
        arguments = [
            f"model={config.model}",
            f"objective={objective}",
            "deepspeed=zero1",
            "model.random_init=true",
            f"model.shape.max_position_embeddings={max(config.tokens, 1024)}",
            "global_batch=1",
            "micro_batch=1",
            "tracker.mode=disabled",
        ]
        self.settings = settings("train", TrainConfig, [*arguments, *overrides])
        self.architecture = model_config(self.settings.model)
        self.tokens, self.size = config.tokens, self.architecture.vocab_size
        start()
        self.engine = Engine(assemble(self.settings, vocab(self.size))[0], self.settings)

    def step(self, index: int) -> float:
        """Take a step; return its loss, for which it waits."""
        objective, device = self.settings.objective, self.engine.device
        batch = random_batch(self.size, self.tokens, objective, device, seed=index)
        return float(self.engine.step([batch], 1e-4, key=(0, index))[0].mean())


def steps(objective: str, config: TrainCheckConfig) -> dict[str, Any]:
    """Measure seconds of a step, MFU, and peak memory beside the plan's, under ZeRO 1 in bfloat16."""
    before = psutil.Process().memory_info().rss
    run = Steps(objective, config)
    losses, seconds = [], []
    for step in range(config.steps + 1):
        began = time.perf_counter()
        losses.append(run.step(step))
        seconds.append(time.perf_counter() - began)
    second, cuda = sorted(seconds[1:])[config.steps // 2], config.device == "cuda"
    flops = step_flops(run.architecture, run.settings, seq_len=config.tokens).model
    peak = peak_flops(run.engine.device_name(), config.peak_tflops)
    planned = estimate_memory(run.architecture, run.settings, ranks=1, seq_len=config.tokens, cuda=cuda)
    measured = run.engine.peak_memory() - (0 if cuda else before)
    return {
        "first_step_seconds": seconds[0],
        "step_seconds": second,
        "mfu": None if peak is None else flops / (second * peak),
        "peak_bytes": measured,
        "planned_bytes": planned.total,
        "planned_share": planned.total / measured,
        "losses": losses,
        "gradient_norm": run.engine.gradient_norm(),
        "passed": all(map(math.isfinite, [*losses, run.engine.gradient_norm()])),
    }


def resume(config: TrainCheckConfig) -> dict[str, Any]:
    """Compare the loss of the step after a save, in the run that saved and in one that resumes."""
    layers = f"model.shape.num_hidden_layers={LAYERS}"
    with tempfile.TemporaryDirectory(dir=Path(config.out).parent) as folder:
        run = Steps("branch", config, layers)
        for step in range(2):
            run.step(step)
        began = time.perf_counter()
        _, failure = run.engine.save(Path(folder), "step")
        if failure is not None:
            raise failure
        seconds, whole = time.perf_counter() - began, run.step(2)
        again = Steps("branch", config, layers)
        again.engine.load(Path(folder), "step")
        resumed = again.step(2)
    apart = abs(resumed - whole) / abs(whole)
    return {"loss": whole, "resumed_loss": resumed, "save_seconds": seconds, "passed": apart < SAME}


def vocab(size: int) -> Vocab:
    """Return the vocabulary of random tokens: adaptive ids 2 to 8."""
    return Vocab(size=size, bos=0, eos=1, pre=None, suf=None, mid=None, eot=None, adaptive=tuple(range(2, 9)))


def random_batch(
    size: int, tokens: int, objective: ObjectiveConfig, device: torch.device, seed: int = 0
) -> dict[str, Any]:
    """Return one sequence of random ids below `size`, laid out."""
    span = np.zeros(1, dtype=SPAN)
    span["stop"] = tokens
    ids = np.random.default_rng(seed).integers(9, size, tokens)
    sequence = PackedSequence(ids, span, np.empty(0, dtype=np.uint8))
    multiple = CUDA_COLUMNS if device.type == "cuda" else COLUMNS
    return to_tensors(lay_out([sequence], [0], vocab(size), objective, seed=(seed,), multiple=multiple), device)


PARTS: dict[str, Callable[[TrainCheckConfig], dict[str, Any]]] = {
    "attention": attention,
    "optimizer": optimizer,
    "dual": partial(steps, "dual"),
    "branch": partial(steps, "branch"),
    "resume": resume,
}


if __name__ == "__main__":
    part, values = sys.argv[1:]
    print(MARK + json.dumps(PARTS[part](TrainCheckConfig(**json.loads(values)))), flush=True)
