"""What the domains share: a command as its user calls it, and small finished folders, made once.

data                  a few files of the standard library, with shards, tokenizer and adaptive tokens
training              six steps in float32 under ZeRO 1, with its last three checkpoints
model, sharded        its export, in one file of weights and in several
gated_training, gated gated LoRA over that model, and the export with the adapter
"""

import atexit
import functools
import io
import os
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from conf import UserError, settings
from data_prep.pipeline import prepare
from tests import warm
from tests.conftest import data_settings
from tests.messages import error
from tests.train.resume_worker import RECIPE
from train.__main__ import main as train
from train.config import TrainConfig
from train.export import ExportConfig
from train.export.__main__ import main as export

ROOT = Path(__file__).parents[3]
ALONE = 200  # one command of so many runs in a process of its own too
TRAINING = [*RECIPE, "steps=6", "save_every=2", "validate_every=6", "deepspeed=zero1"]
TRAINING += ["deepspeed.bf16.enabled=false", "+model.shape.initializer_range=0.3"]  # or texts repeat one token
GATED = ["model=pretrained", "lora.rank=2", "lora.gated=true", "objective=branch"]


@dataclass(frozen=True)
class Result:
    """How a command ended; `refusal` is its one sentence, else empty."""

    refusal: str
    stdout: str = ""

    @property
    def outcome(self) -> str:
        return "refused" if self.refusal else "fine"


def call(module: str, arguments: Sequence[str], rng: random.Random) -> Result:
    """Run `python -m module arguments` in this process, so that imports are paid once.

    Raises AssertionError unless it ends well or in one sentence.
    """
    alone = rng.randrange(ALONE) == 0
    stdout, stderr = io.StringIO(), io.StringIO()
    code: int | str | None = 0
    with patch.object(sys, "argv", [module, *arguments]), redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as end:
            code = end.code
    result = judged(code, stdout.getvalue(), stderr.getvalue())
    if alone and not any("\0" in text for text in arguments):  # an argument cannot have one
        command = [sys.executable, "-m", module, *map(os.fsencode, arguments)]
        process = subprocess.run(command, cwd=ROOT, capture_output=True)
        output = [stream.decode("utf-8", "replace") for stream in (process.stdout, process.stderr)]
        again = judged(process.returncode, *output)
        assert again.outcome == result.outcome, f"in this process {result}, as a command {again}"
    return result


def judged(code: int | str | None, stdout: str, stderr: str) -> Result:
    """Return how a command ended; raise AssertionError unless well or in one sentence."""
    assert code in (0, None, 2), f"exit code {code}: {stderr}"
    assert "Traceback" not in stderr, stderr
    refusal = stderr[max(0, stderr.rfind("error: ")) :]  # a library may have warned before
    return Result(error(refusal) if code == 2 else "", stdout)


def refused(refusal: UserError) -> str:
    """Check that a refusal is one line that names a value; return its outcome."""
    message = str(refusal)
    assert "\n" not in message and " got " in message and not message.rstrip().endswith("got"), repr(message)
    return "refused"


@functools.cache
def demo() -> Path:
    """Return the folder of all of them, made in another process: a training leaves its engine behind."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    warm.run_ranks("tests.drills.fuzz.setup", folder, ranks=1, env=environment).check_returncode()
    return folder


def main(folder: Path) -> None:
    prepare(data_settings(folder / "data", "shard_tokens=20000"))
    data = f"data.path={folder / 'data'}"
    train(settings("train", TrainConfig, [*TRAINING, data, f"out={folder / 'training'}"]))
    _export(folder, "training", "model")
    _export(folder, "training", "sharded", "shard_size=50KB")
    shapeless = [text for text in TRAINING if not text.lstrip("+").startswith("model")]
    base = [f"model.path={folder / 'model'}", data, f"out={folder / 'gated_training'}"]
    train(settings("train", TrainConfig, [*shapeless, *GATED, *base]))
    _export(folder, "gated_training", "gated")


def _export(folder: Path, training: str, model: str, *more: str) -> None:
    arguments = [f"checkpoint={folder / training}", f"out={folder / model}", "dtype=float32", "verify=false"]
    export(settings("export", ExportConfig, [*arguments, "tracker.mode=disabled", *more]))


if __name__ == "__main__":
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    main(Path(sys.argv[1]))
