"""Compare one rank of the engine with plain PyTorch."""

import json
import os
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch.nn.utils import parameters_to_vector

from conf.devices.dtype import cpu_has_bfloat16
from conf.errors import UserError
from conf.settings.compose import settings
from data_prep.shards import Shards
from tests.conftest import vocab_of
from tests.train.resume_worker import RECIPE
from tests.train.test_deepspeed_settings import PUBLISHED
from train import engine as engine_module
from train.config import TrainConfig
from train.data import load_batch, share_masked_mean
from train.engine import (
    Abandoned,
    Engine,
    free_memory,
    reseed,
    start,
)
from train.model import AdaptiveLM, build_module
from train.optimizer import parameter_groups
from train.pretrained import model_config
from train.tensor_files import load_mapped

LR = 1e-2


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """Make this process the only rank, and restore its environment."""
    with mock.patch.dict(os.environ):
        start()
        yield


class Setup:
    """A tiny model and its batches under some settings."""

    def __init__(self, data: Path, *overrides: str) -> None:
        batch = ["global_batch=4", "micro_batch=1"]
        arguments = [*RECIPE, f"data.path={data}", *batch, *overrides]
        self.config = settings("train", TrainConfig, arguments)
        self.vocab = vocab_of(data)
        self._shards = Shards(data, "train")

    def module(self) -> AdaptiveLM:
        architecture = model_config(self.config.model, vocab=self.vocab)
        return build_module(self.config, architecture, self.vocab)[0]

    def batches(self, step: int, micro_batch: int = 1) -> list[dict[str, Any]]:
        """Return the batches of one step, which has four sequences."""
        return [
            load_batch(
                self._shards,
                4 * step + indices,
                self.vocab,
                self.config.objective,
                seed=(0, step),
                device=torch.device("cpu"),
            )
            for indices in np.arange(4).reshape(-1, micro_batch)
        ]

    def train(self, engine: Engine, steps: int = 3) -> list[float]:
        return [
            float(engine.step(self.batches(s), LR, key=(0, s))[0].mean())
            for s in range(steps)
        ]


def plain(setup: Setup, module: AdaptiveLM, steps: int = 3) -> list[float]:
    """Train by the plain PyTorch loop that the engine must equal; return the mean losses."""
    config = setup.config.optimizer
    groups = parameter_groups(module, config)
    optimizers = [
        torch.optim.Muon([group], lr=LR, adjust_lr_fn="match_rms_adamw")
        if group["muon"]
        else torch.optim.AdamW([group], lr=LR, betas=(config.beta1, config.beta2))
        for group in groups
    ]
    means = []
    for step in range(steps):
        losses = []
        for batch in setup.batches(step):
            loss = module(**batch)[0]
            (loss / 4).backward()
            losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(module.parameters(), config.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        means.append(sum(losses) / 4)
    return means


@pytest.mark.parametrize(
    ("stage", "name"), [*((stage, "adamw") for stage in range(4)), (0, "muon")]
)
def test_accumulation_and_clipping_equal_the_plain_loop(
    data_folder: Path, tmp_path: Path, stage: int, name: str
) -> None:
    """Bug: stage 3 partitions weights into one-dimensional tensors, so no weight was decayed.

    Muon iterates in bfloat16, so its tolerance is larger.
    """
    whole = Setup(data_folder, "deepspeed=zero0")
    whole.module().lm.save_pretrained(tmp_path)
    setup = Setup(
        data_folder,
        f"deepspeed=zero{stage}",
        f"optimizer.name={name}",
        "optimizer.clip=0.05",
        "model=pretrained",
        f"model.path={tmp_path}",
    )
    module = setup.module()
    assert (stage == 3) == all(p.numel() == 0 for p in module.lm.parameters())
    engine = Engine(module, setup.config)
    losses = setup.train(engine)
    assert engine.gradient_norm() > 0.05, "clipped"
    close = 1e-5 if name == "adamw" else 3e-4
    assert losses == pytest.approx(plain(setup, whole.module()), rel=0, abs=close)


@pytest.mark.parametrize("objective", ["branch", "dual"])
def test_masked_positions_count_alike_in_every_micro_batch(
    data_folder: Path, objective: str
) -> None:
    """Bug: masked_mean=masked was a mean of the micro-batches' means, so micro_batch changed the loss."""
    setup = Setup(data_folder, f"objective={objective}", "objective.masked_mean=masked")
    module = setup.module()
    losses = []
    for micro_batch in (1, 2, 4):
        batches = setup.batches(0, micro_batch)
        share_masked_mean(batches, ranks=1)
        own = [float(module(**batch)[0].detach()) for batch in batches]
        losses.append(sum(own) / len(own))
    assert losses == pytest.approx([losses[-1]] * 3, rel=1e-5)


@pytest.mark.parametrize("preset", ["zero2", "zero3", "zero2_offload"])
def test_bfloat16_gradients_are_added_up_in_float32(
    data_folder: Path, preset: str
) -> None:
    """Bug: sums over 16 micro-batches were in bfloat16, and the norm was off by 3.6e-4."""
    common = ["dtype=bfloat16", "global_batch=16", "optimizer.clip=0"]
    if "offload" in preset:
        common += ["deepspeed.zero_optimization.offload_optimizer.pin_memory=false"]
    setup = Setup(data_folder, f"deepspeed={preset}", *common)
    batches = [batch for step in range(4) for batch in setup.batches(step)]
    reference = setup.module()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        loss = reference(**batch)[0] / 16
        gradients = torch.autograd.grad(loss, list(reference.parameters()))
        total = total + torch.cat([part.double().flatten() for part in gradients])
    engine = Engine(setup.module(), setup.config)
    engine.step(batches, 0.0, key=(0, 0))
    assert engine.gradient_norm() == pytest.approx(float(total.norm()), rel=1e-5)


def test_the_first_step_in_bfloat16_is_adams_first(data_folder: Path) -> None:
    """Bug: DeepSpeed's stage 0 takes a step on zero gradients before the first step."""
    result = []
    for stage in (0, 1):
        setup = Setup(data_folder, f"deepspeed=zero{stage}", "dtype=bfloat16")
        module = setup.module()
        setup.train(Engine(module, setup.config), steps=1)
        result.append(parameters_to_vector(module.parameters()).float())
    # Adam's first step moves every weight by the learning rate.
    assert (result[0] - result[1]).abs().max() < LR / 2


def test_rotary_frequencies_stay_exact_in_bfloat16(data_folder: Path) -> None:
    """Bug: frequencies were rounded like weights, so far positions had other angles than in serving."""
    exact = dict(Setup(data_folder).module().named_buffers())
    setup = Setup(data_folder, "deepspeed=zero1", "dtype=bfloat16")
    module = setup.module()
    Engine(module, setup.config)
    assert exact and all(
        torch.equal(buffer, exact[name]) for name, buffer in module.named_buffers()
    )


def test_a_published_file_trains_like_the_preset(
    data_folder: Path, tmp_path: Path
) -> None:
    """Bug: its offload setting raised an exception, because DeepSpeed required its own optimizer."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(PUBLISHED))
    losses = []
    for choice in (file, "zero3"):
        setup = Setup(data_folder, f"deepspeed={choice}")
        losses.append(setup.train(Engine(setup.module(), setup.config)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class Malicious:
    """An object that runs code when its pickle is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.putenv, ("RAN", "1")


def test_loading_a_checkpoint_runs_no_code(data_folder: Path, tmp_path: Path) -> None:
    """Bug: a resumed run executed the functions that a checkpoint's pickles name."""
    setup = Setup(data_folder)
    engine = Engine(setup.module(), setup.config)
    folder = tmp_path / "step"
    folder.mkdir()
    engine.save(tmp_path, "step")
    file = next(folder.glob("*model_states.pt"))
    state = torch.load(file, weights_only=False)
    torch.save(state | {"lr_scheduler": Malicious()}, file)
    with pytest.raises(UserError, match="got a pickle of posix.putenv"):
        engine.load(tmp_path, "step")


class NamedStage:
    """Pickles like a stage of ZeRO in Python 3.11.2: by getattr and the name."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (ZeroStageEnum, "gradients")


def test_a_checkpoint_of_python_3_11_2_loads(tmp_path: Path) -> None:
    """Bug: on Debian 12 no ZeRO checkpoint could be exported: "got a pickle of getattr"."""
    torch.save({"zero_stage": NamedStage()}, tmp_path / "state.pt")
    assert load_mapped(tmp_path / "state.pt") == {"zero_stage": 2}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_interrupted_step_changes_no_weights(
    data_folder: Path, tmp_path: Path, stage: int
) -> None:
    """Bug: signals were checked only between steps, so schedulers killed runs with long steps."""
    setup = Setup(data_folder, f"deepspeed=zero{stage}")
    engine = Engine(setup.module(), setup.config)
    first, second = setup.train(engine, steps=2)
    engine = Engine(setup.module(), setup.config)
    assert setup.train(engine, steps=1) == [first]
    requested = iter([False, True])
    with pytest.raises(Abandoned):
        engine.step(setup.batches(1), LR, key=(0, 1), stop=lambda: next(requested))
    assert engine.save(tmp_path, "step-000001")[1] is None
    resumed = Engine(setup.module(), setup.config)
    resumed.load(tmp_path, "step-000001")
    assert float(resumed.step(setup.batches(1), LR, key=(0, 1))[0].mean()) == second


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_weights_are_saved_once_and_loaded(
    data_folder: Path, tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen weights come back bit for bit, in files of limited size, also tied ones.

    A checkpoint has only the trained weights; one that lacks a trained weight is refused.
    """
    monkeypatch.setattr(engine_module, "FROZEN_BYTES", 50_000)
    setup = Setup(
        data_folder,
        *(f"deepspeed=zero{stage}", "lora.rank=2", "lora.gated=true"),
        # Adaptive rows would get a head of their own.
        *("objective.mask=noise", "+model.shape.tie_word_embeddings=true"),
    )
    engine = Engine(setup.module(), setup.config)
    files, failure = engine.save_frozen(tmp_path)
    assert failure is None and len(files) > 1
    assert {path.name for path in tmp_path.iterdir()} == files.keys()
    saved = {k: v for name in files for k, v in load_mapped(tmp_path / name).items()}
    changed = Engine(setup.module(), setup.config)
    for parameter, _ in changed._frozen.values():
        getattr(parameter, "ds_tensor", parameter).data.zero_()
    changed.load_frozen(tmp_path)
    for parameter, names in changed._frozen.values():
        with deepspeed.zero.GatheredParameters(
            [parameter], enabled=hasattr(parameter, "ds_id")
        ):
            for name in names:
                assert torch.equal(saved[name], parameter) and saved[name].any()
    assert any(len(names) > 1 for _, names in changed._frozen.values())
    engine.save(tmp_path, "step")
    (model,) = (load_mapped(p) for p in (tmp_path / "step").glob("*model_states.pt"))
    assert not saved.keys() & model["module"].keys()
    changed.load(tmp_path, "step")
    changed._trained = [["lm.missing"]]
    with pytest.raises(UserError, match="all trained weights, got no lm.missing"):
        changed.load(tmp_path, "step")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_model_of_a_closed_engine_is_freed(data_folder: Path, stage: int) -> None:
    """Bug: DeepSpeed's hooks kept the models of all earlier jobs of a sweep."""
    setup = Setup(data_folder, f"deepspeed=zero{stage}")
    engine = Engine(setup.module(), setup.config)
    setup.train(engine, steps=1)
    model = weakref.ref(engine._engine.module)
    engine.close()
    del engine
    free_memory()
    assert model() is None


def test_each_step_and_micro_batch_has_random_numbers_of_its_own() -> None:
    draws = []
    for key in ((0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0)):
        reseed(*key)
        draws.append(float(torch.rand(())))
    assert len(set(draws)) == 4


SHAPES = """
import ctypes
import train.engine
import torch

names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"

class Memory(ctypes.Structure):  # glibc's mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

def used(first, last):
    for rows in range(first, last):
        torch.nn.functional.linear(torch.ones(rows, 512, dtype=torch.bfloat16), weight)
    memory = library.mallinfo2()
    return memory.hblkhd + memory.uordblks  # bytes in mapped blocks and in the heap's

library = ctypes.CDLL(None)
library.mallinfo2.restype = Memory
weight = torch.ones(512, 512, dtype=torch.bfloat16)
print((-used(33, 233) + used(233, 433)) / 2**20)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not cpu_has_bfloat16(),
    reason="needs glibc and a CPU with bfloat16",
)
def test_products_of_many_shapes_keep_no_memory() -> None:
    """Bug: a step with a new number of windows kept 30 MB (SmolLM2), up to 1,024 kernels."""
    caches = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    environment = {name: v for name, v in os.environ.items() if name not in caches}
    done = subprocess.run(
        [sys.executable, "-c", SHAPES], env=environment, capture_output=True, text=True
    )
    assert float(done.stdout) < 40, done.stderr


@pytest.mark.parametrize(
    ("overrides", "compiles"),
    [(["steps=0"], False), (["steps=1"], True), (["steps=0", "minutes=1"], True)],
)
def test_a_validation_alone_compiles_nothing(
    data_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    compiles: bool,
) -> None:
    """Bug: a mean of adapters (steps=0) took half a minute for the compiler."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    module = Setup(data_folder, "model.compile=true", *overrides).module()
    layers = module.lm.get_decoder().layers
    assert all((layer._compiled_call_impl is not None) is compiles for layer in layers)
