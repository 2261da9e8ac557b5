"""python -m infer.gpu_check: what this project claims of a GPU, on the one at hand, as one JSON file.

Fails where a draft changed a token; of speed it only tells. The file is written either way.
"""

from conf import run
from infer.gpu_check import GpuCheckConfig


def main(config: GpuCheckConfig) -> None:
    """Check, measure, write, show."""
    # Imported late: a mistake in the settings is reported without waiting for PyTorch.
    from infer.gpu_check.run import check_gpu

    check_gpu(config)


if __name__ == "__main__":
    run("gpu_check", GpuCheckConfig, main)
