"""What the GSD paper measures of its drafts, on models and prompts at hand."""

from dataclasses import dataclass, field

from conf.schema import MODEL, PATH
from infer.benchmarks import PromptSetConfig
from infer.config import DraftConfig, check_at_least, check_dtype, check_growth

PARTS = ("methods", "sampling", "time", "recurrence", "ablation", "merging", "ranks")


@dataclass
class StudyConfig:
    """python -m infer.study: the GSD paper's measurements of drafts, on a model and one that drafts for it.

    Raises ValueError for an unknown part, for no draft model and for one that does not draft by levels, and for
    values out of range.
    """

    model: str = field(metadata=MODEL)  # a Transformers directory, or a hub name
    out: str = field(metadata=PATH)  # the folder to write
    prompts: dict[str, PromptSetConfig]
    draft: DraftConfig = field(default_factory=DraftConfig)
    parts: list[str] = field(default_factory=lambda: list(PARTS))  # what is measured
    dtype: str = "float32"  # of both models: float32, bfloat16 or float16
    # what torchrun's processes divide: prompts (each has whole models), or model (tensor parallel; each has
    # the whole draft model)
    divide: str = "prompts"
    k: int = 4  # children of a node of TSD and GSD
    theta_prob: float = 0.2  # a node less likely than this gets no children
    theta_sib: float = 0.3  # one below this share of its best sibling's chance is dropped
    tau: int = 2  # of GSD: tokens that must recur for nodes to be merged
    tau_reading: str = "preceding"  # what tau counts: preceding (the authors' code) or gram (the paper's text)
    self_layers: int = 1  # layers of the model's own that draft for Self-SSD
    nodes: int = 100  # verified in a step where the budget is fixed
    rounds: int = 3  # alternations of all decoders over every prompt, where time is measured
    max_new_tokens: int = 128  # of a text, at most
    threads: int | None = None  # of the CPU; null: the library's choice
    seed: int = 0  # chooses the prompts

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"parts must be some of {', '.join(PARTS)}, got {part}")
        if not self.parts:
            raise ValueError(f"parts must be some of {', '.join(PARTS)}, got none")
        if self.draft.model is None:
            raise ValueError("draft must be a model, draft=DIR or draft=self:N, got none")
        if self.draft.adaptive:
            raise ValueError(
                "draft.adaptive must be false, since the study is of drafts level by level, got true"
            )
        check_dtype(self.dtype)
        check_growth(self)
        if self.divide not in ("prompts", "model"):
            raise ValueError(f"divide must be prompts or model, got {self.divide or 'nothing'}")
        bounds = dict.fromkeys(("k", "self_layers", "nodes", "rounds", "max_new_tokens", "threads"), 1)
        check_at_least(self, bounds)
        if "sampling" in self.parts and self.nodes < self.k:
            raise ValueError(
                f"nodes must be at least {self.k} with sampling among parts, where a node's children are "
                f"verified together, got {self.nodes}"
            )
