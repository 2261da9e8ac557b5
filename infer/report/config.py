"""The settings of `python -m infer.report`."""

from dataclasses import dataclass, field

from conf.tracker import TrackerConfig
from conf.typed import PATH


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
