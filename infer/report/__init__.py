"""Reports: JSON, tables, plots and one page of what infer.speed and infer.quality measured."""

from infer.report.terminal import print_report
from infer.report.write import build, write

__all__ = ["build", "print_report", "write"]
