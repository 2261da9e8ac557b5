"""python -m infer.quality: what the answers of a model are worth, beside those of the model it was tuned from.

work.py      the problems that can be judged here, batches of answers, a model's answers
run.py       from the settings to the report: answers, verdicts, result
result.py    units of work -> quality.json: pass@k, intervals, differences of two models
"""

from dataclasses import dataclass, field

from conf.schema import MODEL, PATH
from conf.tracker import TrackerConfig
from infer.benchmarks import BenchmarkConfig
from infer.config import SIDE_BY_SIDE, check_at_least, check_dtype
from infer.engine.sampling import SEEDS
from infer.sandbox import SandboxConfig

DECODERS = ("plain", "sdsat")


@dataclass
class QualityConfig:
    """python -m infer.quality: benchmarks answered by a model, and by the one that it was tuned from.

    Raises ValueError for values out of range, and for decoders with nothing to be compared with.
    """

    model: str = field(metadata=MODEL)  # a Transformers directory, best an export, or a hub name
    out: str = field(metadata=PATH)  # the report's folder; the result is out/quality
    benchmarks: dict[str, BenchmarkConfig]
    tracker: TrackerConfig
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    # the model before it was tuned, with the same token ids; null: none
    base: str | None = field(default=None, metadata=MODEL)
    decoders: list[str] = field(default_factory=lambda: list(DECODERS))  # of the model; of the base plain
    samples: int = 0  # sampled answers to every problem that is executed, beside the likeliest one
    k: list[int] = field(default_factory=lambda: [1, 10])  # pass@k, of the sampled answers
    temperature: float = 0.8  # of the sampled answers
    top_p: float = 0.95  # of the sampled answers
    max_new_tokens: int = 512  # of an answer, at most
    dtype: str = "auto"  # of the weights; in float32 every answer of sdsat must be that of plain
    batch: int = 8  # answers decoded side by side, and kept together
    workers: int | None = None  # programs judged at once on this machine; null: one for each core
    threads: int | None = None  # of the CPU; null: the library's choice
    seed: int = 0  # chooses the problems, and draws the sampled answers

    def __post_init__(self) -> None:
        for name in self.decoders:
            if name not in DECODERS:
                raise ValueError(f"decoders must be of {', '.join(DECODERS)}, got {name}")
        if "plain" not in self.decoders:
            others = ", ".join(self.decoders) or "none"
            raise ValueError(f"decoders must contain plain, with which the others are compared, got {others}")
        if not self.benchmarks:
            raise ValueError("benchmarks must name at least one, got none")
        check_dtype(self.dtype)
        if not 1 <= self.batch <= SIDE_BY_SIDE:
            raise ValueError(f"batch must be from 1 to {SIDE_BY_SIDE}, got {self.batch}")
        check_at_least(self, {"max_new_tokens": 1, "workers": 1, "threads": 1, "samples": 0})
        if not 0 <= self.seed < SEEDS:
            raise ValueError(f"seed must be a number of up to 63 bits, got {self.seed}")
        if not self.temperature > 0:
            raise ValueError(f"temperature of sampled answers must be above 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not self.k or min(self.k) < 1:
            raise ValueError(f"k must be numbers of answers from 1 on, got {self.k}")
        if 0 < self.samples < max(self.k):
            raise ValueError(f"k must be at most samples={self.samples}, got {max(self.k)}")
