"""What every rank does for test_resume.py: `torchrun -m tests.train.resume_worker CASES
FOLDER DATA`.

Starting PyTorch and DeepSpeed costs more than all of it, so many runs share one start.
A run leaves its folder; what it raised is in <folder>/<run>.reported.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path
from unittest import mock

import torch

from conf import UserError, settings
from conf.stage import made_from, read_manifest
from train import engine as engines
from train.__main__ import CHANGEABLE
from train.config import TrainConfig
from train.trainer import Stopped, Trainer

STEPS, SAVE_EVERY = 12, 4
RECIPE = [
    "experiment=demo",
    "model=demo",
    "++model.shape.hidden_size=32",
    "++model.shape.intermediate_size=48",
    "++model.shape.num_hidden_layers=1",
    "++model.shape.num_attention_heads=2",
    "++model.shape.num_key_value_heads=2",
    f"steps={STEPS}",
    f"save_every={SAVE_EVERY}",
    "keep_last=3",
    "validate_every=6",
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
    "dropout": ["deepspeed=zero2", "+model.shape.attention_dropout=0.3"],
    "bf16": ["deepspeed=zero2", "dtype=bfloat16"],
    "own": ["deepspeed=zero1", "data.own={data}", "data.own_share=0.4"],
}


class Run:
    """The runs of one rank."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data = folder, data
        self.rank, self.ranks = engines.start()

    def train(self, name: str, variant: str, *overrides: str) -> Trainer | None:
        """Train into <folder>/<name>; a sentence for the user, or a stop, is written
        beside it.
        """
        chosen = [text.format(data=self.data) for text in VARIANTS[variant]]
        arguments = [*RECIPE, *chosen, f"data.path={self.data}", *overrides]
        config = settings(
            "train", TrainConfig, [*arguments, f"out={self.folder / name}"]
        )
        built = made_from(config, {"data.path": str(self.data)}, CHANGEABLE)
        trainer = None
        try:
            trainer = Trainer(
                config, built, read_manifest(self.data, "shards", "data.path")
            )
            trainer.run()
        except (UserError, Stopped) as message:
            (self.folder / f"{name}.reported.{self.rank}").write_text(str(message))
        torch.distributed.barrier()
        return trainer

    def interrupted(self, whole: str, name: str, step: int) -> Path:
        """A copy of a finished run as a kill after some step would have left it."""
        out = self.folder / name
        if self.rank == 0:
            shutil.copytree(self.folder / whole, out)
            (out / "manifest.json").unlink(missing_ok=True)
            for checkpoint in (out / "checkpoints").glob("step-*"):
                if int(checkpoint.name.removeprefix("step-")) > step:
                    checkpoint.rename(
                        checkpoint.with_name(f".{checkpoint.name}.partial")
                    )
        torch.distributed.barrier()
        return out


def whole_and_resumed(run: Run) -> None:
    """Every variant from start to end, and again from its second checkpoint."""
    for variant in VARIANTS:
        run.train(variant, variant)
        run.interrupted(variant, f"{variant}-resumed", 2 * SAVE_EVERY)
        run.train(f"{variant}-resumed", variant)


def broken(run: Run) -> None:
    """A flipped bit in the newest checkpoint, and in all of them."""
    for name, steps in {"flipped": [8]}.items():
        out = run.interrupted("zero2", name, 2 * SAVE_EVERY)
        for step in steps if run.rank == 0 else []:
            path = (
                out
                / f"checkpoints/step-{step:06d}/zero_pp_rank_1_mp_rank_00_optim_states.pt"
            )
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        torch.distributed.barrier()
        run.train(name, "zero2")


def failing(run: Run) -> None:
    """A disk that is full for the second rank's second checkpoint; a loss that is not a
    number on one rank.
    """
    write = engines.write_file

    def full(value: object, path: Path) -> dict[str, int]:
        if run.rank == 1 and "000008" in str(path):
            path.write_bytes(b"half")
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        return write(value, path)

    with mock.patch.object(engines, "write_file", full):
        run.train("full", "zero2")
    run.interrupted("full", "full-resumed", 4)
    run.train("full-resumed", "zero2")
    with mock.patch.object(engines.Engine, "forward", spoiled(run, step=6)):
        run.train("nan", "zero2")


def spoiled(run: Run, *, step: int) -> Callable[..., object]:
    """The engine's forward pass, with one loss of the last rank not a number."""
    forward, calls = engines.Engine.forward, [0]

    def spoil(self: engines.Engine, batch: dict[str, object]) -> object:
        loss, *rest = forward(self, batch)
        if torch.is_grad_enabled():
            calls[0] += 1
            if run.rank == run.ranks - 1 and calls[0] == 2 * step:
                loss = loss * float("nan")
        return loss, *rest

    return spoil


def stopped(run: Run) -> None:
    """A signal to one rank, in the first of its sixth step's micro-batches; then the
    rest.
    """
    forward, calls = engines.Engine.forward, [0]

    def signalled(self: engines.Engine, batch: dict[str, object]) -> object:
        calls[0] += torch.is_grad_enabled()
        if run.rank == 1 and calls[0] == 11:
            os.kill(os.getpid(), signal.SIGUSR1)
        return forward(self, batch)

    with mock.patch.object(engines.Engine, "forward", signalled):
        run.train("stopped", "zero2")
    run.interrupted("stopped", "stopped-before", 2 * SAVE_EVERY)
    run.train("stopped", "zero2")


def longer(run: Run) -> None:
    """A finished run with more steps, then with fewer."""
    if run.rank == 0:
        shutil.copytree(run.folder / "zero2", run.folder / "longer")
    torch.distributed.barrier()
    run.train("longer", "zero2", f"steps={STEPS + 4}")
    run.train("longer", "zero2", f"steps={STEPS}")


def other_ranks(run: Run) -> None:
    """What two ranks began ends on this number."""
    for variant in ("zero0", "zero1", "zero3", "own"):
        run.interrupted(variant, f"{variant}-other", 2 * SAVE_EVERY)
        run.train(f"{variant}-other", variant)


if __name__ == "__main__":
    cases, folder, data = sys.argv[1:]
    this = Run(Path(folder), Path(data))
    for case in cases.split(","):
        globals()[case](this)
