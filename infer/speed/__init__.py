"""python -m infer.speed: decoders against plain decoding in the same loop, pair by pair."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from conf.schema import MODEL, PATH
from conf.tracker import TrackerConfig
from infer.benchmarks import PromptSetConfig
from infer.config import (
    BY_DRAFT_MODEL,
    DTYPES,
    GROWTH,
    SIDE_BY_SIDE,
    DecodeConfig,
    DraftConfig,
    check_at_least,
    check_growth,
)
from infer.trees.lattice import DEEPEST, RANKS

BY_ADAPTIVE = ("sdsat", "adaptive", "auto")  # draft by adaptive tokens
OWN = (*BY_ADAPTIVE, "ngrams", "prompt_lookup", *BY_DRAFT_MODEL)
PEERS = {
    "generate": "generate",
    "prompt_lookup": "generate prompt lookup",
    "assisted": "generate assisted",
    "vllm": "vllm",
}  # settings, and what their rows are called


@dataclass
class SpeedConfig:
    """python -m infer.speed: decode prompts plainly and with drafts, in pairs, and report the difference.

    The draft model's decoders are there where one is given. Raises ValueError for an unknown decoder, peer or
    type, and for values out of range.
    """

    model: str = field(metadata=MODEL)  # a Transformers directory, best an export, or a hub name
    out: str = field(metadata=PATH)  # the report's folder
    prompts: dict[str, PromptSetConfig]
    tracker: TrackerConfig
    # the model before fine-tuning, decoded plainly; null: none
    base: str | None = field(default=None, metadata=MODEL)
    draft: DraftConfig = field(default_factory=DraftConfig)
    # beside plain: sdsat (the paper's two forwards, at each k), adaptive (adaptive tokens alone, by
    # measurement), auto (all sources of drafts, by measurement: decode=sdsat), ngrams (of the text and the
    # training data, without adaptive tokens), prompt_lookup (the text alone, ten in a row); with draft also
    # ssd, tsd and gsd
    decoders: list[str] = field(default_factory=lambda: list(OWN))
    peers: list[str] = field(default_factory=lambda: list(PEERS))  # other libraries' decoding, where installed
    k: list[int] = field(default_factory=lambda: [1, 2, 3, 5, 7])  # drafts in a row of sdsat: a row each
    children: int | None = None  # k of tsd and gsd, children of a node; null: 4
    theta_prob: float | None = None  # of ssd, tsd and gsd, as in decode; null: 0.2
    theta_sib: float | None = None  # of tsd and gsd; null: 0.3
    tau: int | None = None  # of gsd; null: 2
    tau_reading: str = "gram"  # of gsd: gram or preceding
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.2, 1.0])  # 0: greedy; a row each
    top_k: int = 10  # of temperatures above 0 (SDSAT 3.4.2); 0: all
    top_p: float = 0.95  # of temperatures above 0
    dtypes: list[str] = field(default_factory=lambda: ["auto"])  # of the weights; float32 must be exact
    rounds: int = 3  # times that every prompt is decoded each way
    # texts side by side, by plain decoding and by auto, at the lowest temperature: a row each; []: none
    batches: list[int] = field(default_factory=lambda: [1, 4, 8])
    max_new_tokens: int = 256  # of a text, at most
    compile: bool = False  # a GPU's forward by torch.compile: a minute first, then faster
    threads: int | None = None  # of the CPU; null: the library's choice
    seed: int = 0  # chooses the prompts, and what is drawn

    def __post_init__(self) -> None:
        for name, known in {"decoders": OWN, "peers": PEERS, "dtypes": DTYPES}.items():
            for value in getattr(self, name) or (["none"] if name == "dtypes" else ()):
                if value not in known:
                    raise ValueError(f"{name} must be some of {', '.join(known)}, got {value}")
        for name in ("decoders", "peers", "dtypes", "k", "temperatures", "batches"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must have each value once, got {values}")
        if not self.prompts:
            raise ValueError("prompts must have a set, got none")
        if not self.k or min(self.k) < 1:
            raise ValueError(f"k must be numbers of adaptive tokens from 1 on, got {self.k}")
        if self.batches and not 0 < min(self.batches) <= max(self.batches) <= SIDE_BY_SIDE:
            raise ValueError(f"batches must be numbers from 1 to {SIDE_BY_SIDE}, got {self.batches}")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperatures must be from 0 on, got {self.temperatures}")
        check_growth(self)
        check_at_least(self, {"children": 1, "rounds": 1, "max_new_tokens": 2, "threads": 1, "top_k": 0})
        shortest = min(s.max_new_tokens or self.max_new_tokens for s in self.prompts.values())
        if "sdsat" in self.decoders and max(self.k) >= shortest:
            # The first token of a text is no draft's.
            raise ValueError(f"k must be below max_new_tokens={shortest}, got {max(self.k)}")
        if "sdsat" in self.decoders and max(self.temperatures) and max(self.k) > DEEPEST:
            trees = "with temperatures above 0, whose trees are the paper's"
            raise ValueError(f"k must be at most {DEEPEST} {trees}, got {max(self.k)}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0, up to 1, got {self.top_p}")

    @property
    def has_batches(self) -> bool:
        """Whether batches are measured: they compare the default decoder."""
        return bool(self.batches) and "auto" in self.decoders


class Condition(NamedTuple):
    """Whose texts are the same, and whose plain decoding is the measure."""

    dtype: str
    temperature: float


class DecoderSpec(NamedTuple):
    """A way to decode; k is 0 where it has none."""

    decoder: str
    k: int = 0


PLAIN = DecoderSpec("plain")
GSD_PROBES = "gsd probes"  # drafts by the draft model's own adaptive tokens
DRAFTED = (*BY_DRAFT_MODEL, GSD_PROBES)  # by a draft model


def specs(config: SpeedConfig, temperature: float) -> dict[DecoderSpec, DecodeConfig]:
    """Return the decoders, plain decoding first; a draft model's where one is given.

    sdsat is the paper's two forwards; sampled text has the paper's trees (SDSAT 3.4.2, decode=nucleus). What
    drafts by adaptive tokens alone says so: the default of the method is all sources.
    """
    plain = DecodeConfig("plain", temperature=temperature, max_new_tokens=config.max_new_tokens)
    if temperature:
        plain = replace(plain, top_k=config.top_k, top_p=config.top_p)
    fixed: dict[str, dict[str, Any]] = {
        "adaptive": {"method": "sdsat", "sources": ["adaptive"]},
        "auto": {"method": "sdsat"},
        "ngrams": {"method": "ngrams"},
        "prompt_lookup": {"method": "prompt_lookup"},
    }
    specs = {PLAIN: plain}
    for name in config.decoders:
        if name == "sdsat":
            for k in config.k:
                two = replace(plain, method="sdsat", sources=["adaptive"], probes="root", k=k)
                specs[DecoderSpec("sdsat", k)] = replace(two, width=RANKS, tree="paper") if temperature else two
        elif name in fixed:
            specs[DecoderSpec(name.replace("_", " "))] = replace(plain, **fixed[name])
        elif config.draft.model:
            growth = {key: getattr(config, "children" if key == "k" else key) for key in GROWTH[name]}
            specs[DecoderSpec(name)] = replace(plain, method=name, **growth)
    if config.draft.adaptive and "gsd" in config.decoders:
        specs[DecoderSpec(GSD_PROBES)] = replace(plain, method="gsd")
    return specs
