"""python -m infer.speed: plain decoding and every other way side by side, on prompts, in pairs.

    torchrun --nproc_per_node 8 -m infer.speed model=DIR [base=DIR0] [draft=DIR2] prompts=humaneval out=DIR

Every rank has whole models of its own and a share of the turns; a run that was interrupted goes on, on the same
machine with the same number of threads (threads=N; torchrun's own is 1). In float32
every text of ours must be that of plain decoding, or the run fails, once its report is written.
"""

from conf import run
from infer.config import check_directory
from infer.speed import SpeedConfig


def main(config: SpeedConfig) -> None:
    """Measure and report, unless the folder already holds the measurements."""
    check_directory(config.model)
    # Imported late: a mistake in the settings is reported without waiting for PyTorch.
    from infer.speed.run import measure_speed

    measure_speed(config)


if __name__ == "__main__":
    run("speed", SpeedConfig, main)
