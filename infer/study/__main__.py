"""python -m infer.study: the GSD paper's measurements on a model and one that drafts for it.

    python -m infer.study model=DIR draft=DIR2 prompts.held_out.path=FILE out=DIR [parts=[methods,ranks]]
    torchrun --nproc_per_node 8 -m infer.study ...                      the ranks divide the prompts

Tables on the terminal; report.json and a plot of each part in the folder. A finished folder is not
measured again.
"""

from conf import run
from infer.config import check_directory
from infer.study import StudyConfig


def main(config: StudyConfig) -> None:
    """Measure and report, unless the folder already holds the report."""
    check_directory(config.model)
    # Imported late: a mistake in the settings is reported without waiting for PyTorch.
    from infer.study.run import measure_study

    measure_study(config)


if __name__ == "__main__":
    run("study", StudyConfig, main)
