"""One rank of test_resume.py: `torchrun -m tests.train.resume_worker CASES FOLDER DATA`.

Starting PyTorch and DeepSpeed takes longer than all runs together, so the runs share one
process per rank. A run writes its folder, and rank R writes the message of an error to
<folder>/<run>.reported.R.
"""

import copy
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from errno import ENOSPC
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from conf.errors import UserError
from conf.runs.stage import collect_provenance
from conf.settings.compose import settings
from tests.recipes import BRANCH
from train import engine as engines
from train.__main__ import CHANGEABLE
from train.config import TrainConfig
from train.distributed import Abandoned, StopSignals
from train.inputs import RunInputs, read_inputs
from train.metrics import Show
from train.spec import ModelSpec, read_spec
from train.trainer import Stopped, Trainer

STEPS, SAVE_EVERY = 6, 2
RECIPE = [
    "model=tiny",
    *BRANCH,
    "++model.shape.hidden_size=32",
    "++model.shape.intermediate_size=48",
    "++model.shape.num_hidden_layers=1",
    "++model.shape.num_attention_heads=2",
    "++model.shape.num_key_value_heads=2",
    f"steps={STEPS}",
    f"save_every={SAVE_EVERY}",
    "keep_last=3",
    "validate_every=3",
    "validate_sequences=4",
    "global_batch=8",
    "micro_batch=2",
    "optimizer.warmup_steps=1",
    "optimizer.lr=1.0e-2",
    "tracker.mode=disabled",
    "dtype=float32",
]
VARIANTS = {
    **{f"zero{stage}": [f"deepspeed=zero{stage}"] for stage in range(4)},
    "bf16": ["deepspeed=zero2", "dtype=bfloat16", "+model.shape.attention_dropout=0.3"],
    "muon": ["deepspeed=zero0", "dtype=bfloat16", "optimizer.name=muon"],
    "gated": ["deepspeed=zero0", "lora.rank=4", "lora.gated=true"],
    "tied": [
        *("deepspeed=zero3", "dtype=bfloat16", "lora.rank=4", "lora.gated=true"),
        *("objective.mask=noise", "+model.shape.tie_word_embeddings=true"),
    ],
    "own": ["deepspeed=zero1", "data.own={data}", "data.own_share=0.4"],
}
# Continued on another number of ranks. `own` is also ZeRO 1.
OTHER_RANKS = ("zero0", "zero3", "own", "gated")


@cache
def prepare(
    data: Path, variant: str, *overrides: str
) -> tuple[TrainConfig, RunInputs, ModelSpec]:
    """Compose the settings of a run, except its folder; read its inputs and its model.

    Runs with the same settings share the result; each takes a copy, because training may change it.
    """
    variant_settings = [text.format(data=data) for text in VARIANTS[variant]]
    paths = [f"data.path={data}", "out=unset"]
    config = settings(
        "train", TrainConfig, [*RECIPE, *variant_settings, *paths, *overrides]
    )
    inputs = read_inputs(config)
    return config, inputs, read_spec(config, inputs)


class Run:
    """Trains runs on one rank."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data = folder, data
        self.rank, self.ranks = engines.start()

    def train(self, name: str, variant: str, *overrides: str) -> None:
        """Train into <folder>/<name>; write a UserError or Stopped next to the folder."""
        config, inputs, spec = copy.deepcopy(prepare(self.data, variant, *overrides))
        config = replace(config, out=str(self.folder / name))
        provenance = collect_provenance(config, inputs.folders, CHANGEABLE)
        handler = signal.getsignal(signal.SIGINT)
        try:
            Trainer(config, provenance, inputs, spec).run()
        except (UserError, Stopped) as message:
            (self.folder / f"{name}.reported.{self.rank}").write_text(str(message))
        # Bug: a sweep ignored Ctrl-C between its jobs, after this.
        assert signal.getsignal(signal.SIGINT) == handler
        torch.distributed.barrier()

    def interrupted(self, whole: str, name: str) -> Path:
        """Copy a finished run into the state after a kill that followed its second checkpoint."""
        out = self.folder / name
        if self.rank == 0:
            shutil.copytree(self.folder / whole, out)
            (out / "manifest.json").unlink()
            last = out / "checkpoints" / f"step-{STEPS:06d}"
            last.rename(last.with_name(f".{last.name}.partial"))
        torch.distributed.barrier()
        return out


def whole_and_resumed(run: Run) -> None:
    """Train every variant from start to end, and again from its second checkpoint."""
    for variant in VARIANTS:
        run.train(variant, variant)
        run.interrupted(variant, f"{variant}-resumed")
        run.train(f"{variant}-resumed", variant)


def broken(run: Run) -> None:
    """Continue a run with a flipped bit in its newest checkpoint."""
    out = run.interrupted("zero2", "flipped")
    if run.rank == 0:
        path = out / "checkpoints/step-000004/zero_pp_rank_1_mp_rank_00_optim_states.pt"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    torch.distributed.barrier()
    run.train("flipped", "zero2")


def full(run: Run) -> None:
    """Fill the disk during the second rank's second checkpoint; then continue."""
    write = engines.write_file

    def fail(value: object, path: Path) -> dict[str, int]:
        if run.rank == 1 and "000004" in str(path):
            path.write_bytes(b"half")
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        return write(value, path)

    with mock.patch.object(engines, "write_file", fail):
        run.train("full", "zero2")
    run.train("full", "zero2")


def failing_forward(micro_batch: int, fail: Callable[[], float]) -> Any:
    """Patch the engine: call `fail` in one training forward of the last rank.

    `micro_batch` is the number of the forward, from 1. The loss is multiplied by the result.
    """
    forward, calls = engines.Engine.forward, itertools.count(1)

    def patched(self: engines.Engine, batch: dict[str, object]) -> object:
        loss, *rest = forward(self, batch)
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        if torch.is_grad_enabled() and next(calls) == micro_batch and last:
            loss = loss * fail()
        return loss, *rest

    return mock.patch.object(engines.Engine, "forward", patched)


def diverged(run: Run) -> None:
    """Make the loss NaN in the last micro-batch of one rank's third step."""
    with failing_forward(6, lambda: float("nan")):
        run.train("nan", "zero2")


def stopped(run: Run) -> None:
    """Send a signal to one rank in the first micro-batch of its fourth step; then continue."""

    def stop() -> float:
        os.kill(os.getpid(), signal.SIGUSR1)
        return 1.0

    with failing_forward(7, stop):
        run.train("stopped", "zero2")
    run.train("stopped", "zero2")


def early(run: Run) -> None:
    """Send a signal before the first validation; then continue. Also if it is the only one."""
    for name, steps in (("early", STEPS), ("validated", 0)):
        with mock.patch.object(StopSignals, "agreed", lambda self, device: True):
            run.train(name, "zero0", f"steps={steps}")
        with without_page():
            run.train(name, "zero0", f"steps={steps}")


def late(run: Run) -> None:
    """Send a signal in the last validation; then finish the run, and continue it with one more step."""
    validate = Trainer._validate

    def abandoned(self: Trainer, show: Show) -> None:
        if self.step == 4:
            raise Abandoned
        validate(self, show)

    with mock.patch.object(Trainer, "_validate", abandoned):
        run.train("late", "zero0", "steps=4")
    for steps in (4, 5):
        run.train("late", "zero0", f"steps={steps}")


def unfinished(run: Run) -> None:
    """Continue a run of no steps that was killed between its checkpoint and its manifest."""
    if run.rank == 0:
        shutil.copytree(run.folder / "validated", run.folder / "unfinished")
        (run.folder / "unfinished" / "manifest.json").unlink()
    torch.distributed.barrier()
    run.train("unfinished", "zero0", "steps=0")


def foreign(run: Run) -> None:
    """Train into a folder of another program, and into that of a run killed before run.json."""
    for name, file in (("foreign", "log.jsonl"), ("killed", ".run.json.0123456789ab")):
        if run.rank == 0:
            (run.folder / name).mkdir()
            (run.folder / name / file).write_text("{}")
        torch.distributed.barrier()
        run.train(name, "zero0", "steps=0")


def basic(run: Run) -> None:
    """Train the baseline, which has no masked term, with each masked_mean."""
    for mean in ("n", "masked"):
        objective = ["objective=basic", "objective.soft=0", "steps=2"]
        objective.append(f"objective.masked_mean={mean}")
        run.train(f"basic-{mean}", "zero0", *objective)


def unrecorded(run: Run) -> None:
    """Continue a run without the record of its settings."""
    out = run.interrupted("zero2", "unrecorded")
    if run.rank == 0:
        (out / "run.json").unlink()
    torch.distributed.barrier()
    run.train("unrecorded", "zero2")


def longer(run: Run) -> None:
    """Continue a finished run with more steps, then with fewer."""
    if run.rank == 0:
        shutil.copytree(run.folder / "zero2", run.folder / "longer")
    torch.distributed.barrier()
    run.train("longer", "zero2", f"steps={STEPS + 4}")
    run.train("longer", "zero2", f"steps={STEPS}")


def planned(run: Run) -> None:
    """Train for about a second, and again from before the last checkpoint."""
    run.train("planned", "zero1", "minutes=0.02", "save_every=4")
    out = run.folder / "planned-resumed"
    if run.rank == 0:
        shutil.copytree(run.folder / "planned", out)
        (out / "manifest.json").unlink()
        shutil.rmtree(max((out / "checkpoints").iterdir()))
    torch.distributed.barrier()
    run.train("planned-resumed", "zero1", "minutes=0.02", "save_every=4")


def other_ranks(run: Run) -> None:
    """Continue runs that began on two ranks with this number of ranks."""
    for variant in OTHER_RANKS:
        run.interrupted(variant, f"{variant}-other")
        run.train(f"{variant}-other", variant)


def without_page() -> Any:
    """Leave out the page of each run: its plots take longer than the training."""
    return mock.patch("train.page.write_page")


if __name__ == "__main__":
    cases, folder, data = sys.argv[1:]
    run = Run(Path(folder), Path(data))
    for case in cases.split(","):
        with nullcontext() if case in ("diverged", "early") else without_page():
            globals()[case](run)
