"""One rank of the engine against plain PyTorch."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from conf import UserError, settings
from data_prep.shards import Shards
from data_prep.vocab import Vocab
from tests.conftest import tiny_llama
from tests.train.resume_worker import RECIPE
from train.checkpoint import Checkpoint, to_universal
from train.config import TrainConfig
from train.data import load_batch
from train.engine import (
    Abandoned,
    Engine,
    count_parameters,
    parameter_groups,
    start,
)
from train.model import AdaptiveLM, assemble, describe

LR = 1e-2


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """This process as the only rank; what it tells the environment is not for the
    commands of later tests.
    """
    with mock.patch.dict(os.environ):
        start()
        yield


class Setup:
    """A tiny model and its batches under some settings."""

    def __init__(self, data: Path, *overrides: str) -> None:
        arguments = [
            *RECIPE,
            f"data.path={data}",
            "global_batch=4",
            "micro_batch=1",
            *overrides,
        ]
        self.config = settings("train", TrainConfig, arguments)
        self.vocab = Vocab.from_json(
            json.loads((data / "manifest.json").read_text())["vocab"]
        )
        self._shards = Shards(data, "train")

    def module(self) -> AdaptiveLM:
        return assemble(self.config, self.vocab)[0]

    def batches(self, step: int) -> list[dict[str, Any]]:
        """Of one step, a sequence each."""
        return [
            load_batch(
                self._shards,
                np.array([4 * step + i]),
                self.vocab,
                self.config.objective,
                seed=(0, step),
                device=torch.device("cpu"),
            )
            for i in range(4)
        ]

    def train(self, engine: Engine, steps: int = 3) -> list[float]:
        return [
            float(engine.step(self.batches(s), LR, key=(0, s))[0].mean())
            for s in range(steps)
        ]


def plain(setup: Setup, module: AdaptiveLM, steps: int = 3) -> list[float]:
    """The loop that the engine stands for."""
    config = setup.config.optimizer
    groups = parameter_groups(module, config)
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(config.beta1, config.beta2))
    means = []
    for step in range(steps):
        losses = []
        for batch in setup.batches(step):
            loss = module(**batch)[0]
            (loss / 4).backward()
            losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(module.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        means.append(sum(losses) / 4)
    return means


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_accumulation_and_clipping_are_the_plain_loops(
    data_folder: Path, stage: int
) -> None:
    setup = Setup(
        data_folder, f"deepspeed=zero{stage}", "dtype=float32", "optimizer.clip=0.05"
    )
    module, reference = setup.module(), setup.module()
    engine = Engine(module, setup.config)
    assert setup.train(engine) == pytest.approx(
        plain(setup, reference), rel=0, abs=1e-6
    )
    assert engine.gradient_norm() > 0.05, "clipped"
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=1e-5
        )  # Adam magnifies rounding of small gradients


@pytest.mark.parametrize("preset", ["zero2", "zero3", "zero2_offload"])
def test_bfloat16_gradients_are_added_up_in_float32(
    data_folder: Path, preset: str
) -> None:
    """Sixteen micro-batches added up in bfloat16: the gradient's norm was off by
    3.6e-4.
    """
    pinned = (
        ["deepspeed.zero_optimization.offload_optimizer.pin_memory=false"]
        if "offload" in preset
        else []
    )
    common = ["dtype=bfloat16", "global_batch=16", "optimizer.clip=0", *pinned]
    setup = Setup(data_folder, f"deepspeed={preset}", *common)
    batches = [batch for step in range(4) for batch in setup.batches(step)]
    reference, total = setup.module(), 0.0
    for batch in batches:
        (reference(**batch)[0] / 16).backward()
        total += torch.cat(
            [
                p.grad.double().flatten()
                for p in reference.parameters()
                if p.grad is not None
            ]
        )
        reference.zero_grad()
    engine = Engine(setup.module(), setup.config)
    engine.step(batches, 0.0, key=(0, 0))
    assert engine.gradient_norm() == pytest.approx(float(total.norm()), rel=1e-5)


def test_the_first_step_in_bfloat16_is_adams_first(data_folder: Path) -> None:
    """DeepSpeed's stage 0 took a step on zero gradients first: after one step the loss
    was off by 0.02 in 7.
    """
    result = []
    for stage in (0, 1):
        setup = Setup(data_folder, f"deepspeed=zero{stage}", "dtype=bfloat16")
        module = setup.module()
        engine = Engine(module, setup.config)
        setup.train(engine, steps=1)
        result.append(
            torch.cat([p.detach().float().flatten() for p in module.parameters()])
        )
    # Adam's first step moves every weight by the learning rate.
    assert (result[0] - result[1]).abs().max() < LR / 2


def test_rotary_frequencies_stay_exact_in_bfloat16(data_folder: Path) -> None:
    """They were rounded like weights, for training alone: a frequency was off by 0.06
    %, so that far positions had other angles than where the model is served.
    """
    exact = dict(Setup(data_folder, "dtype=float32").module().named_buffers())
    setup = Setup(data_folder, "deepspeed=zero1", "dtype=bfloat16")
    module = setup.module()
    Engine(module, setup.config)
    assert exact and all(
        torch.equal(buffer, exact[name]) for name, buffer in module.named_buffers()
    )


def test_zero_3_loads_a_directory_in_parts(data_folder: Path, tmp_path: Path) -> None:
    """A weight that is taken apart has one dimension: none was decayed."""
    single = "dtype=float32"
    setup = Setup(data_folder, "deepspeed=zero3", single)
    lm = setup.module().lm
    lm.save_pretrained(tmp_path)
    loaded = Setup(
        data_folder,
        "deepspeed=zero3",
        single,
        "model=pretrained",
        f"model.path={tmp_path}",
    )
    module = loaded.module()
    assert all(p.numel() == 0 for p in module.lm.parameters()), "only parts are held"
    assert count_parameters(module.lm) == sum(p.numel() for p in lm.parameters())
    whole = Setup(
        data_folder,
        "deepspeed=zero0",
        single,
        "model=pretrained",
        f"model.path={tmp_path}",
    )
    expected = whole.train(Engine(whole.module(), whole.config))
    engine = Engine(module, loaded.config)
    assert loaded.train(engine) == pytest.approx(expected, abs=1e-5)


def test_of_read_only_data_what_is_copied_can_be_written_again(
    data_folder: Path, tmp_path: Path
) -> None:
    """The folder took the mode of the data's: on read-only data a training could not go
    on.
    """
    data = tmp_path / "data"
    shutil.copytree(data_folder / "tokenizer", data / "tokenizer")
    for path in (*(data / "tokenizer").iterdir(), data / "tokenizer"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    out = tmp_path / "model"
    describe(tiny_llama(), data, out)
    assert {path.name for path in out.iterdir()} > {
        path.name for path in (data / "tokenizer").iterdir()
    }
    assert all(path.stat().st_mode & 0o200 for path in (out, *out.iterdir()))
    (data / "tokenizer").chmod(0o755)


class Foreign:
    """A pickle that would run something."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.putenv, ("RAN", "1")


def test_a_checkpoint_runs_nothing(data_folder: Path, tmp_path: Path) -> None:
    """Going on from a checkpoint ran whatever its pickles name; an export refused them
    already.
    """
    setup = Setup(data_folder)
    engine = Engine(setup.module(), setup.config)
    (tmp_path / "step").mkdir()
    written, _ = engine.save(tmp_path, "step")
    file = next((tmp_path / "step").glob("*model_states.pt"))
    state = torch.load(file, weights_only=False)
    torch.save(state | {"lr_scheduler": Foreign()}, file)
    with pytest.raises(
        UserError,
        match="must have tensors and plain values, got a pickle of posix.putenv",
    ):
        engine.load(tmp_path, "step")
    with pytest.raises(UserError, match="must be a file as DeepSpeed .* got .*putenv"):
        to_universal(
            tmp_path / "step", Checkpoint(1, 2, 0, {}, written), tmp_path / "universal"
        )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_is_abandoned_changes_nothing(
    data_folder: Path, tmp_path: Path, stage: int
) -> None:
    """A signal was looked at between steps alone: before the end of a long one the
    scheduler killed the run.
    """
    setup = Setup(data_folder, f"deepspeed=zero{stage}", "dtype=float32")
    whole = setup.train(Engine(setup.module(), setup.config), steps=2)
    engine, requested = Engine(setup.module(), setup.config), iter([False, True])
    assert setup.train(engine, steps=1) == whole[:1]
    with pytest.raises(Abandoned):
        engine.step(setup.batches(1), LR, key=(0, 1), stop=lambda: next(requested))
    assert engine.save(tmp_path, "step-000001")[1] is None
    again = Engine(setup.module(), setup.config)
    again.load(tmp_path, "step-000001")
    assert float(again.step(setup.batches(1), LR, key=(0, 1))[0].mean()) == whole[1]
