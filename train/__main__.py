"""torchrun -m train: settings in, a finished training folder out; with plan=true, a plan."""

import os
from pathlib import Path

from conf import UserError, run
from conf.stage import is_finished, made_from, read_manifest
from train.config import TrainConfig
from train.metrics import describe_change

# What changes nothing in the result.
NO_MATTER = (
    "tracker", "plan", "plan_ranks", "plan_device", "plan_utilisation", "peak_tflops", "memory_check",
    "max_loss_rise",
)  # fmt: skip


def main(config: TrainConfig) -> None:
    """Plan, or train unless the folder already holds the result."""
    if config.plan:
        from train.plan import print_plan

        print_plan(config)
        return
    for name, value in {"out": config.out, "data.path": config.data.path}.items():
        if not value:
            raise UserError(f"setting '{name}' is required: give it as {name}=VALUE")
    data = read_manifest(config.data.path, "shards", "data.path")
    inputs = {"data.path": config.data.path}
    if config.model.path is not None and (Path(config.model.path) / "manifest.json").is_file():
        inputs["model.path"] = config.model.path
    made = made_from(config, inputs, ignore=NO_MATTER)
    if is_finished(config.out, "checkpoint", made):
        validation = read_manifest(config.out, "checkpoint", "out")["validation"]
        _tell(f"{config.out} is finished: nothing to do")
    else:
        # Imported late: a mistake in the settings is told without waiting for the engine.
        from train.checks import check_start

        check_start(config, data)
        from train.loop import Trainer

        validation = Trainer(config, made, data).run()
    _tell(describe_change(validation))


def _tell(sentence: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"train: {sentence}", flush=True)


if __name__ == "__main__":
    run("train", TrainConfig, main)
