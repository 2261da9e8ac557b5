"""python -m infer.quality: benchmarks answered by a model, plainly and with SDSAT, and by its base.

    python -m infer.quality model=DIR base=DIR0 benchmarks=humaneval,mbpp,multipl_e,infilling out=DIR

Under torchrun the answers are divided over the ranks. What is done stays: an interrupted run goes on. The
result is DIR/quality. In float32 every answer of SDSAT must be that of plain decoding, token for token.
"""

from conf import run
from infer.config import check_directory
from infer.quality import QualityConfig


def main(config: QualityConfig) -> None:
    """Answer, judge and report, unless the folder already holds the result."""
    check_directory(config.model)
    # Imported late: a mistake in the settings is reported without waiting for PyTorch.
    from infer.quality.run import measure_quality

    measure_quality(config)


if __name__ == "__main__":
    run("quality", QualityConfig, main)
