"""Train a model: `torchrun -m train` reads settings and writes a training folder.

With plan=true it prints a plan and trains nothing.
"""

import os
import sys
from pathlib import Path

from conf.console import print_once, torchrun_rank
from conf.errors import UserError
from conf.runs.stage import (
    collect_provenance,
    is_finished,
    model_directories,
    read_manifest,
)
from conf.settings.cli import run
from train.config import TrainConfig
from train.schedule import read_planned

# Settings that may change when a run continues. They change the weights by rounding at most, except
# `steps`, which the manifest contains.
CHANGEABLE = (
    "steps",
    "minutes",
    "tracker",
    "loss_chunk",
    "trunk_cache",
    "plan",
    "plan_ranks",
    "plan_device",
    "memory_check",
    "save_every",
    "validate_every",
    "validate_sequences",
    "keep_last",
    "max_loss_ratio",
    "max_loss_rise",
)
# Exit code of a run that a signal stopped and that can continue: EX_TEMPFAIL of sysexits.h.
EXIT_STOPPED = 75
# Environment variable with the path of a file for the exit code: torchrun returns its own code.
EXIT_FILE = "TRAIN_EXIT_FILE"


def main(config: TrainConfig) -> float | None:
    """Print a plan, or train unless the folder already contains the result.

    Returns the last held-out acceptance length, which a sweep can maximize.
    """
    if config.plan:
        from train.plan import print_plan

        print_plan(config)
        return None
    for name, value in {"out": config.out, "data.path": config.data.path}.items():
        if not value:
            raise UserError(f"setting '{name}' is required: give it as {name}=VALUE")
    data = read_manifest(config.data.path, "shards", "data.path")
    inputs = {
        "data.path": config.data.path,
        **model_directories({"model.path": config.model.path}),
    }
    if config.data.own:
        read_manifest(config.data.own, "shards", "data.own")
        inputs["data.own"] = config.data.own
    if folder := config.model.adapter_folder:
        inputs["model.adapter"] = str(folder)
    provenance = collect_provenance(config, inputs, ignore=CHANGEABLE)
    done = 0
    steps: int | None = config.steps
    if config.minutes is not None:
        planned = read_planned(config.out)
        steps = planned.steps if planned else None
    if is_finished(config.out, "checkpoint", provenance):
        manifest = read_manifest(config.out, "checkpoint", "out")
        validation = manifest["validation"]
        done = manifest["step"]
        config.check_steps(done)
    if steps is not None and done >= steps:
        print_once(f"train: {config.out} is finished: nothing to do")
    else:
        # Imported late, so that errors in the settings are reported before PyTorch and
        # DeepSpeed are loaded.
        from train.checks import check_start

        check_start(config, data)
        from train.trainer import Stopped, train

        try:
            validation = train(config, provenance, data)
        except Stopped as stop:
            print_once(f"train: {stop}")
            sys.exit(EXIT_STOPPED)
    from train.metrics import acceptance_lengths, describe_change

    print_once(f"train: {describe_change(validation)}")
    return next(reversed(acceptance_lengths(validation)), None)


if __name__ == "__main__":
    try:
        run("train", TrainConfig, main)
    except SystemExit as end:
        if (path := os.environ.get(EXIT_FILE)) and not torchrun_rank()[2]:
            Path(path).write_text(f"{end.code}\n", encoding="utf-8")
        raise
