"""python -m infer.bench.compare: compare finished reports in tables on the terminal.

Each report's speeds are from its own machine, and its speedups are over its own plain decoding.
"""

from dataclasses import dataclass
from pathlib import Path

from conf.errors import UserError
from conf.settings.cli import run
from conf.settings.schema import check_settings, setting


@dataclass
class CompareConfig:
    """python -m infer.bench.compare: compare finished reports in shared tables."""

    #: folders of finished reports, `out` of infer.bench
    reports: list[str] = setting(path=True)
    #: names of the models, one for each report; []: the names of the folders
    names: list[str] = setting([])

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.reports:
            raise ValueError("reports must not be empty. Give reports=[DIR,...].")
        names = self.names or [Path(folder).resolve().name for folder in self.reports]
        if len(names) != len(self.reports):
            raise ValueError(
                f"names must have one name for each of {len(self.reports)} reports, got "
                f"{len(names)}. Omit names to use the names of the folders."
            )
        if len(set(names)) < len(names):
            raise ValueError(
                f"names must be different, got {', '.join(names)}. Give names=[...]"
            )
        self.names = names


def main(config: CompareConfig) -> None:
    """Print the settings of each report, the rows of all reports in shared tables, and notes."""
    # Imported here, so that a wrong setting is reported without waiting for PyTorch.
    from conf.console import PlainConsole
    from infer.bench.comparison import (
        mark_notes,
        model_tables,
        prompt_warnings,
        speed_tables,
    )
    from infer.bench.report import header, read_parts

    reports = {
        name: read_parts(Path(folder), "reports")
        for name, folder in zip(config.names, config.reports)
    }
    for folder, report in zip(config.reports, reports.values()):
        if not (report["speed"] or report["quality"]):
            raise UserError(
                f"reports={folder} must have the part speed or quality. Run python -m infer.bench"
            )
    tables = [*speed_tables(reports), *model_tables(reports)]
    console = PlainConsole()
    for name, report in reports.items():
        for part in ("speed", "quality"):
            if report[part]:
                text = f"{name}: {part}, {header(report[part])}"
                console.print(text, soft_wrap=True)
    for warning in prompt_warnings(reports):
        console.print(warning, soft_wrap=True)
    for table in tables:
        console.table(table.title, table.heads, table.rows, names=table.names)
    for note in mark_notes(reports):
        console.print(note, soft_wrap=True)


if __name__ == "__main__":
    run("compare", CompareConfig, main)
