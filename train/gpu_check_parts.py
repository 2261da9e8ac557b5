"""One part of train.gpu_check: `python -m train.gpu_check_parts NAME SETTINGS` (as JSON).

Each part returns its figures, and in "passed" whether they are right. Flex attention has no gradient on a CPU:
the result says so instead of a figure.
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
from train.attention import DENSE, FLEX, Mask, branch_kernel, branch_mask, register
from train.config import ObjectiveConfig, TrainConfig
from train.data import COLUMNS, CUDA_COLUMNS, lay_out, to_tensors
from train.gpu_check import MARK, TrainCheckConfig
from train.model import AdaptiveLM

NEAR = 1e-3  # relative difference of two kernels' gradients in float32, at most
SAME = 1e-3  # of the loss after a resume, in bfloat16, whose kernels add up in no fixed order
LAYERS = 2  # of the model that is saved and resumed: a checkpoint of a whole one takes 19 GB


class ForcedLM(AdaptiveLM):
    """AdaptiveLM with a given kernel for the branches, also where it has no gradient."""

    kernel = DENSE

    def _mask(self, positions: Tensor, offsets: Tensor, trunk: int) -> Mask | None:
        return branch_mask(positions, offsets, trunk, self.kernel)


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
    torch.manual_seed(0)
    lm = LlamaForCausalLM._from_config(shape, attn_implementation=register("sdpa")).to(config.device)
    module = ForcedLM(lm, chunk=256, L=5)
    batch = random_batch(499, 256, ObjectiveConfig(name="branch"), torch.device(config.device))
    parameters, gradients = list(lm.parameters()), config.device == "cuda"
    results: dict[str, list[Tensor]] = {}
    stance = "default" if gradients else "force_eager"
    with torch.set_grad_enabled(gradients), torch.compiler.set_stance(stance):
        for module.kernel in (DENSE, FLEX):
            loss, *_ = module(**batch)
            results[module.kernel] = [loss, *(torch.autograd.grad(loss, parameters) if gradients else ())]
    apart = [float((b - a).norm() / a.norm()) for a, b in zip(results[DENSE], results[FLEX], strict=True)]
    heads = {"heads": 8, "kv_heads": 4, "width": 16, "dropout": 0.0}
    return {
        "kernel": branch_kernel("auto", config.device, torch.float32, **heads),
        "loss_apart": apart[0],
        "gradients_apart": max(apart[1:]) if gradients else "not run: flex attention has no gradient on a CPU",
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


def steps(objective: str, config: TrainCheckConfig) -> dict[str, Any]:
    """Measure seconds of a step, MFU, and peak memory beside the plan's, under ZeRO 1 in bfloat16."""
    from train.engine import Engine, start
    from train.flops import peak_flops, step_flops
    from train.memory import estimate_memory
    from train.model import assemble
    from train.pretrained import model_config

    run, before = training(objective, config), psutil.Process().memory_info().rss
    start()
    size = model_config(run.model).vocab_size
    engine = Engine(assemble(run, vocab(size))[0], run)
    losses, seconds = [], []
    for step in range(config.steps + 1):
        batch = random_batch(size, config.tokens, run.objective, engine.device, seed=step)
        began = time.perf_counter()
        losses.append(float(engine.step([batch], 1e-4, key=(0, step))[0].mean()))  # waits for the device
        seconds.append(time.perf_counter() - began)
    cuda, architecture = config.device == "cuda", model_config(run.model)
    second = sorted(seconds[1:])[config.steps // 2]
    flops = step_flops(architecture, run.objective, sequences=1, seq_len=config.tokens).model
    peak = peak_flops(engine.device_name(), config.peak_tflops)
    planned = estimate_memory(architecture, run, ranks=1, seq_len=config.tokens, cuda=cuda)
    measured = engine.peak_memory() - (0 if cuda else before)
    return {
        "first_step_seconds": seconds[0],
        "step_seconds": second,
        "mfu": None if peak is None else flops / (second * peak),
        "peak_bytes": measured,
        "planned_bytes": planned.total,
        "planned_share": planned.total / measured,
        "losses": losses,
        "gradient_norm": engine.gradient_norm(),
        "passed": all(map(math.isfinite, [*losses, engine.gradient_norm()])),
    }


def resume(config: TrainCheckConfig) -> dict[str, Any]:
    """Compare the loss of the step after a save, in the run that saved and in one that resumes."""
    from train.engine import Engine, start
    from train.model import assemble
    from train.pretrained import model_config

    run = training("branch", config, f"model.shape.num_hidden_layers={LAYERS}")
    size = model_config(run.model).vocab_size
    start()

    def stepped(engine: Engine, step: int) -> float:
        batch = random_batch(size, config.tokens, run.objective, engine.device, seed=step)
        return float(engine.step([batch], 1e-4, key=(0, step))[0].mean())

    with tempfile.TemporaryDirectory(dir=Path(config.out).parent) as folder:
        engine = Engine(assemble(run, vocab(size))[0], run)
        for step in range(2):
            stepped(engine, step)
        began = time.perf_counter()
        _, failure = engine.save(Path(folder), "step")
        if failure is not None:
            raise failure
        seconds, whole = time.perf_counter() - began, stepped(engine, 2)
        again = Engine(assemble(run, vocab(size))[0], run)
        again.load(Path(folder), "step")
        resumed = stepped(again, 2)
    apart = abs(resumed - whole) / abs(whole)
    return {"loss": whole, "resumed_loss": resumed, "save_seconds": seconds, "passed": apart < SAME}


def training(objective: str, config: TrainCheckConfig, *overrides: str) -> TrainConfig:
    """Return settings of a run on random weights, one sequence a step."""
    return settings(
        "train",
        TrainConfig,
        [
            f"model={config.model}",
            f"objective={objective}",
            "deepspeed=zero1",
            "model.random_init=true",
            f"model.shape.max_position_embeddings={max(config.tokens, 1024)}",
            "global_batch=1",
            "micro_batch=1",
            "tracker.mode=disabled",
            *overrides,
        ],
    )


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
