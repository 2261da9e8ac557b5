"""python -m infer.report: a report of what infer.speed and infer.quality left in a folder, or of two reports.

python -m infer.report out=DIR [training=DIR]
python -m infer.report compare=A,B out=DIR
"""

from pathlib import Path

from conf import run
from conf.console import print_line
from infer.report.config import ReportConfig


def main(config: ReportConfig) -> None:
    """Write and print it."""
    # Imported late: a mistake in the settings is reported without waiting for plots and tracker.
    from infer.report.compare import print_comparison, write_comparison
    from infer.report.terminal import print_report
    from infer.report.write import write

    out = Path(config.out)
    if config.compare:
        first, second = map(Path, config.compared)
        print_comparison(write_comparison(out, first, second))
    else:
        print_report(write(out, config.tracker, Path(config.training) if config.training else None))
    print_line(f"report: {out / 'index.html'}")


if __name__ == "__main__":
    run("report", ReportConfig, main)
