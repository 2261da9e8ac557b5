"""python -m train.gpu_check: training on the GPU at hand, part by part, as one JSON file.

Fails where a part failed. The file is written either way, after every part.
"""

from conf import run
from train.gpu_check.config import TrainCheckConfig


def main(config: TrainCheckConfig) -> None:
    """Check, measure, write, show."""
    # Imported late: a mistake in the settings is told without waiting for PyTorch.
    from train.gpu_check.run import run as measure

    measure(config)


if __name__ == "__main__":
    run("train_check", TrainCheckConfig, main)
