"""What every rank does for test_resume.py: `torchrun -m tests.train.resume_worker CASES FOLDER DATA`.

Starting PyTorch and DeepSpeed costs more than all of it, so many runs share one start. A run
leaves its folder; what it raised is in <folder>/<run>.reported.
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
from transformers import AutoConfig, AutoModelForCausalLM

from conf import UserError, settings
from conf.stage import lock, made_from, read_manifest
from train import engine as engines
from train.__main__ import CHANGEABLE
from train.config import TrainConfig
from train.trainer import Stopped, Trainer

STEPS, SAVE_EVERY = 12, 4
RECIPE = [
    "experiment=demo",
    "model=demo",
    "model.shape.hidden_size=32",
    "model.shape.intermediate_size=48",
    "model.shape.num_hidden_layers=1",
    "model.shape.num_attention_heads=2",
    "model.shape.num_key_value_heads=2",
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
        """Train into <folder>/<name>; a sentence for the user, or a stop, is written beside it."""
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
    for name, steps in {"flipped": [8], "hopeless": [4, 8]}.items():
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
    """A disk that is full for the second rank's second checkpoint; a loss that explodes on one rank."""
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
    for name, factor in {"nan": float("nan"), "exploded": 1e3}.items():
        with mock.patch.object(
            engines.Engine,
            "forward",
            spoiled(run, step=11 if factor > 1 else 6, by=factor),
        ):
            run.train(name, "zero2", "max_loss_ratio=1.5")


def spoiled(run: Run, *, step: int, by: float) -> Callable[..., object]:
    """The engine's forward pass, with one loss of the last rank's spoiled."""
    forward, calls = engines.Engine.forward, [0]

    def spoil(self: engines.Engine, batch: dict[str, object]) -> object:
        loss, *rest = forward(self, batch)
        if torch.is_grad_enabled():
            calls[0] += 1
            if run.rank == run.ranks - 1 and calls[0] == 2 * step:
                loss = loss * by
        return loss, *rest

    return spoil


def stopped(run: Run) -> None:
    """A signal to one rank, in the first of its sixth step's micro-batches; then the rest."""
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


def validating(run: Run) -> None:
    """A signal to one rank in its second validation, after step 6; then the rest, validated otherwise."""
    forward, calls = engines.Engine.forward, [0]

    def signalled(self: engines.Engine, batch: dict[str, object]) -> object:
        calls[0] += not torch.is_grad_enabled()
        if run.rank == 1 and calls[0] == 3:  # of two batches each
            os.kill(os.getpid(), signal.SIGUSR1)
        return forward(self, batch)

    with mock.patch.object(engines.Engine, "forward", signalled):
        run.train("validating", "zero2", "validate_sequences=8")
    run.interrupted("validating", "validating-before", 6)
    run.train(
        "validating",
        "zero2",
        "validate_sequences=4",
        "validate_every=3",
        "tracker.project=other",
    )


def refused_late(run: Run) -> None:
    """A setting that is refused when the model is there, then the run without it."""
    nvme = "+deepspeed.zero_optimization.offload_optimizer.device=nvme"
    (run.folder / "new").mkdir(exist_ok=True)
    run.train("new/refused-late", "zero2", nvme)


def finishing(run: Run) -> None:
    """Killed after the last save, before older checkpoints were removed and the manifest written."""
    out = run.interrupted("zero2", "finishing", STEPS)
    if run.rank == 0:
        shutil.copytree(
            out / "checkpoints/step-000004", out / "checkpoints/step-000002"
        )
        for left in (".step-000001.removed", ".step-000012.partial"):
            (out / "checkpoints" / left).mkdir()
    torch.distributed.barrier()
    run.train("finishing", "zero2")


def longer(run: Run) -> None:
    """A finished run with more steps, then with fewer; an unfinished one with other steps."""
    if run.rank == 0:
        shutil.copytree(run.folder / "zero2", run.folder / "longer")
    torch.distributed.barrier()
    run.train("longer", "zero2", f"steps={STEPS + 4}")
    run.train("longer", "zero2", f"steps={STEPS}")
    run.interrupted("zero2", "shorter", SAVE_EVERY)
    run.train("shorter", "zero2", "steps=8")


def refused(run: Run) -> None:
    """A folder that the system does not let anybody create."""
    if run.rank == 0:
        (run.folder / "refused").symlink_to("/proc/x")
    torch.distributed.barrier()
    run.train("refused", "zero2")


def held(run: Run) -> None:
    """A folder that another run is writing."""
    out = run.folder / "held"
    out.mkdir(exist_ok=True)
    descriptor = lock(out, out) if run.rank == 0 else None
    run.train("held", "zero2")
    if descriptor is not None:
        os.close(descriptor)


def lacking(run: Run) -> None:
    """A base model without one of its weights, or with a smaller one, which ZeRO 3 reads in parts."""
    lacks, changed = (
        "model.layers.0.mlp.up_proj.weight",
        {"missing": None, "smaller": torch.zeros(47, 32)},
    )
    for name, weight in changed.items():
        base = run.folder / f"{name}.base"
        if run.rank == 0:
            lm = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(run.folder / "zero3/model")
            )
            weights = {
                key: tensor for key, tensor in lm.state_dict().items() if key != lacks
            }
            lm.save_pretrained(
                base, state_dict=weights | ({} if weight is None else {lacks: weight})
            )
        torch.distributed.barrier()
        run.train(name, "zero3", "model=pretrained", f"model.path={base}")


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
