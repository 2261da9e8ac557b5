"""The settings of `python -m infer.study`."""

from dataclasses import dataclass, field

from infer.benchmarks.config import PromptSetConfig
from infer.config import DTYPES, DraftConfig

PARTS = ("methods", "sampling", "time", "recurrence", "ablation", "merging", "ranks")


@dataclass
class StudyConfig:
    """python -m infer.study: the GSD paper's measurements of drafts, on a model and one that drafts for it.

    Raises ValueError for an unknown part, for no draft model and for one that does not draft by levels.
    """

    model: str  # a Transformers directory
    out: str  # the folder to write
    prompts: dict[str, PromptSetConfig]
    draft: DraftConfig = field(default_factory=DraftConfig)
    parts: list[str] = field(default_factory=lambda: list(PARTS))  # what is measured
    dtype: str = "float32"  # of both models: float32, bfloat16 or float16
    self_layers: int = 1  # layers of the model's own that draft for Self-SSD
    nodes: int = 100  # verified in a step where the budget is fixed
    rounds: int = 3  # alternations of all decoders over every prompt, where time is measured
    max_new_tokens: int = 128  # of a text, at most
    threads: int | None = None  # of the CPU; null: the library's choice
    seed: int = 0  # chooses the prompts

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"parts: wanted some of {', '.join(PARTS)}, found {part}")
        if not self.parts:
            raise ValueError(f"parts: wanted some of {', '.join(PARTS)}, found none")
        if self.draft.model is None:
            raise ValueError("draft: wanted a model that drafts, draft=DIR or draft=self:N, found none")
        if self.draft.adaptive:
            raise ValueError(
                "draft.adaptive: wanted false, since the study is of drafts level by level, found true"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: wanted one of {', '.join(DTYPES)}, found {self.dtype}")
        for name in ("self_layers", "nodes", "rounds", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: wanted at least 1, found {getattr(self, name)}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads: wanted at least 1, found {self.threads}")
