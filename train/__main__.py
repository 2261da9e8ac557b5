"""Train a model: `torchrun -m train` reads settings and writes a training folder.

With plan=true it prints a plan and trains nothing.
"""

import os
import sys
from pathlib import Path

from conf.console import print_once, torchrun_rank
from conf.errors import UserError
from conf.runs.stage import collect_provenance, read_finished
from conf.settings.cli import run
from train.config import TrainConfig
from train.inputs import RunInputs, read_inputs
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
        # Imported late, so that errors in the settings are reported before PyTorch and
        # DeepSpeed are loaded.
        from train.plan import print_plan
        from train.spec import read_spec

        planned = read_inputs(config) if config.data.path else None
        print_plan(config, planned, read_spec(config, planned))
        return None
    if not config.out:
        raise UserError("setting 'out' is required: give it as out=VALUE")
    validation = train(config, read_inputs(config))
    from train.metrics import acceptance_lengths, describe_change

    print_once(f"train: {describe_change(validation)}")
    print_once(f"train: curves and settings are in {config.out}/index.html")
    return next(reversed(acceptance_lengths(validation)), None)


def train(config: TrainConfig, inputs: RunInputs) -> list[dict[str, float]]:
    """Train unless the folder already contains the result; return the validations."""
    provenance = collect_provenance(config, inputs.folders, ignore=CHANGEABLE)
    steps: int | None = config.steps
    if config.minutes is not None:
        planned = read_planned(config.out)
        steps = planned.steps if planned else None
    if manifest := read_finished(config.out, "checkpoint", provenance):
        config.check_steps(manifest["step"])
        if steps is not None and manifest["step"] >= steps:
            print_once(f"train: {config.out} is finished: nothing to do")
            validation: list[dict[str, float]] = manifest["validation"]
            return validation
    from train.checks import check_start
    from train.spec import read_spec
    from train.trainer import Stopped, run_rank

    spec = read_spec(config, inputs)
    check_start(config, inputs, spec)
    try:
        return run_rank(config, provenance, inputs, spec)
    except Stopped as stop:
        print_once(f"train: {stop}")
        sys.exit(EXIT_STOPPED)


if __name__ == "__main__":
    try:
        run("train", TrainConfig, main)
    except SystemExit as end:
        if (path := os.environ.get(EXIT_FILE)) and not torchrun_rank()[2]:
            Path(path).write_text(f"{end.code}\n", encoding="utf-8")
        raise
