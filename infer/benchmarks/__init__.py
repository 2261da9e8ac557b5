"""Benchmarks: problems with their answers and tests, and prompts to decode for speed.

    problems = read_problems(name, config)                      infer.benchmarks.reading
    prompts = load_prompts(name, config, text, seed=seed)       infer.benchmarks.prompts
    rules(kind)                                                 infer.benchmarks.reading

Settings are here, Problem in infer.benchmarks.rows, TokenPrompt in .prompts.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from conf.schema import PATH
from infer.config import ORDERS, check_at_least

EXECUTED = ("humaneval", "mbpp", "multipl_e")  # with tests
JUDGED = (*EXECUTED, "infilling", "lines")
KINDS = (*JUDGED, "gsm8k", "spec_bench", "alpaca", "xsum", "wmt14", "jsonl")


@dataclass
class SourceConfig:
    """Where problems come from, and how they are put to a model.

    Raises ValueError for values out of range; reading refuses settings of other kinds.
    """

    group: ClassVar[str]  # what the settings are called on the command line
    kinds: ClassVar[tuple[str, ...]]

    kind: str | None = None  # what the problems are; null: the set's own name, else jsonl
    # a file; of multipl_e a folder too; null: the kind's package or dataset
    path: str | None = field(default=None, metadata=PATH)
    languages: list[str] | None = None  # of multipl_e, infilling, lines; null: all, on the hub the paper's six
    order: str | None = None  # of infilling: spm or psm; null: spm
    shots: int | None = None  # of mbpp: solved tasks in the prompt, 0 to 3; null: 0

    def __post_init__(self) -> None:
        if self.kind not in (None, *self.kinds):
            kinds = ", ".join(self.kinds)
            raise ValueError(f"{self.group}.kind must be one of {kinds}, got {self.kind or 'none'}")
        if self.order not in (None, *ORDERS):
            raise ValueError(f"{self.group}.order must be spm or psm, got {self.order or 'none'}")
        if self.shots is not None and not 0 <= self.shots <= 3:
            raise ValueError(f"{self.group}.shots must be 0 to 3, got {self.shots}")
        if self.languages is not None and not self.languages:
            raise ValueError(f"{self.group}.languages must name a language, got none")


@dataclass
class PromptSetConfig(SourceConfig):
    """Prompts to decode for speed, of any kind; `prompts.mine.path=FILE` is any JSONL file."""

    group: ClassVar[str] = "prompts"
    kinds: ClassVar[tuple[str, ...]] = KINDS

    key: str | None = None  # of jsonl: the field that holds the text; null: prompt
    share: float = 1.0  # of jsonl: share of a text's lines that is the prompt
    first: float = 1.0  # share of the problems that prompts are drawn from: the first ones, in their order
    count: int | None = 10  # prompts taken; null: all
    max_new_tokens: int | None = None  # of a text, at most; null: as many as of every set
    max_tokens: int | None = None  # longer prompts are passed over
    truncate: int | None = None  # longer prompts keep BOS and their last tokens, this many in all; GSD: 512

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("share", "first"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"prompts.{name} must be above 0 and at most 1, got {getattr(self, name)}")
        least = {"max_new_tokens": 2, "count": 1, "max_tokens": 1, "truncate": 2}
        check_at_least(self, least, group="prompts.")
        if self.truncate is not None and self.max_tokens is not None:
            raise ValueError(
                f"prompts.truncate must be null where max_tokens={self.max_tokens} passes over long prompts, "
                f"got {self.truncate}. Set one of the two to null"
            )


@dataclass
class BenchmarkConfig(SourceConfig):
    """Problems whose answers are judged: by their tests, or by exact match."""

    group: ClassVar[str] = "benchmarks"
    kinds: ClassVar[tuple[str, ...]] = JUDGED

    count: int | None = None  # problems taken, of each language, as the seed says; null: all

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, {"count": 1}, group="benchmarks.")
