"""python -m infer.bench: how fast a model decodes and what its answers are worth."""

from conf.settings.cli import run
from infer.bench.config import BenchConfig
from infer.config import check_directory


def main(config: BenchConfig) -> None:
    """Measure what is not finished, and report."""
    check_directory(config.model)
    # Imported late: a mistake in the settings is reported without waiting for PyTorch.
    from infer.bench.run import bench

    bench(config)


if __name__ == "__main__":
    run("bench", BenchConfig, main)
