"""What the domains of models read, made once by the users' own commands: data, trainings, model directories.

data                  a few files of the standard library
training              six steps in float32 under ZeRO 1, with its last three checkpoints
model, sharded        its export, in one file of weights and in several
gated_training, gated gated LoRA over that model, and the export with the adapter kept
"""

import atexit
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path

from conf import settings
from data_prep.pipeline import prepare
from tests import warm
from tests.conftest import data_settings
from tests.train.resume_worker import RECIPE
from train.__main__ import main as train
from train.config import TrainConfig
from train.export.__main__ import main as export
from train.export.config import ExportConfig

TRAINING = [
    *RECIPE,
    "+model.shape.initializer_range=0.3",  # or its texts would all be one token
    "steps=6",
    "save_every=2",
    "validate_every=6",
    "deepspeed=zero1",
    "deepspeed.bf16.enabled=false",
]
GATED = ["model=pretrained", "lora.rank=2", "lora.gated=true", "objective=branch"]


@functools.cache
def made() -> Path:
    """The folder with all of them. Made in a process of its own: a training leaves its engine behind."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    warm.run_ranks("tests.drills.fuzz.tiny", folder, ranks=1, env=environment).check_returncode()
    return folder


def main(folder: Path) -> None:
    prepare(data_settings(folder / "data"))
    data = f"data.path={folder / 'data'}"
    recipe = settings("train", TrainConfig, [*TRAINING, data, f"out={folder / 'training'}"])
    train(recipe)
    _export(folder, "training", "model")
    _export(folder, "training", "sharded", "shard_size=50KB")
    base = [f"model.path={folder / 'model'}", data, f"out={folder / 'gated_training'}"]
    train(settings("train", TrainConfig, [*_without_shape(TRAINING), *GATED, *base]))
    _export(folder, "gated_training", "gated")


def _without_shape(arguments: list[str]) -> list[str]:
    return [one for one in arguments if not one.lstrip("+").startswith("model")]


def _export(folder: Path, training: str, model: str, *overrides: str) -> None:
    given = [f"checkpoint={folder / training}", f"out={folder / model}", "dtype=float32", "verify=false"]
    given.append("tracker.mode=disabled")
    export(settings("export", ExportConfig, [*given, *overrides]))


if __name__ == "__main__":
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    main(Path(sys.argv[1]))
