"""python -m infer.bench: measure a model's speed and the quality of its answers."""

from conf.settings.cli import run
from infer.bench.config import BenchConfig
from infer.config import check_directory


def main(config: BenchConfig) -> None:
    """Measure the parts that are not finished, and write the report."""
    check_directory(config.model)
    # Imported here, so that a wrong setting is reported without waiting for PyTorch.
    from infer.bench.run import bench

    bench(config)


if __name__ == "__main__":
    run("bench", BenchConfig, main)
