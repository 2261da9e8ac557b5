"""python -m infer.report: a report of what infer.speed and infer.quality left in a folder, or of two reports.

python -m infer.report out=DIR [training=DIR]
python -m infer.report compare=A,B out=DIR
"""

from dataclasses import dataclass, field
from pathlib import Path

from conf import run
from conf.console import print_line
from conf.schema import PATH
from conf.tracker import TrackerConfig


@dataclass
class ReportConfig:
    """python -m infer.report: tables, plots and a page of what infer.speed and infer.quality left in the folder
    out; or, with compare=A,B, of two reports side by side, written into out.

    Raises ValueError for anything but two folders to compare.
    """

    # the folder with speed/ and quality/, or one of them; the page is written there too
    out: str = field(metadata=PATH)
    # two reports' folders, A,B; null: a report of `out` itself
    compare: str | None = field(default=None, metadata={"path": "compared"})
    # the training folder of the model: its recipe, data and curves go into the report, also into later ones
    training: str | None = field(default=None, metadata=PATH)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        if self.compare is not None and len(self.compared) != 2:
            raise ValueError(
                f"compare must be two reports' folders as A,B, got {len(self.compared)}: {self.compare}"
            )
        if self.compare is not None and self.training is not None:
            raise ValueError(
                "training and compare exclude each other. Write the report with training=DIR first"
            )

    @property
    def compared(self) -> list[str]:
        """The folders to compare."""
        names = (self.compare or "").removeprefix("[").removesuffix("]").split(",")
        return [name.strip() for name in names if name.strip()]


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
