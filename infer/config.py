"""The settings of `python -m infer`, and whether a folder can be a model directory. Knows no PyTorch: errors in
them are reported before its import.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.schema import MISSING, MODEL, PATH, take_types
from infer.engine.sampling import SEEDS, Sampling
from infer.trees.lattice import DEEPEST, RANKS

DTYPES = ("auto", "float32", "bfloat16", "float16")
SELF = "self:"  # the model's own first layers
BY_DRAFT_MODEL = ("ssd", "tsd", "gsd")  # by a draft model
GROWN = (
    "depth",
    "theta_prob",
    "theta_sib",
    "tau",
    "draft_rows",
)  # settings of what a draft model draws
GROWTH = {
    "ssd": ("theta_prob",),
    "tsd": ("k", "theta_prob", "theta_sib"),
}  # of the paper, by method
GROWTH["gsd"] = (*GROWTH["tsd"], "tau", "tau_reading")
TAU_READINGS = ("gram", "preceding")
SIDE_BY_SIDE = 8  # prompts decoded together, at most
MOST_ROWS = 4096  # of a draft model in a step, whatever is asked for
ORDERS = ("psm", "spm")  # of an infilling's parts
TREES = ("lattice", "paper")  # of candidates of adaptive tokens
SOURCES = {  # of drafts, by method
    "hybrid": ("adaptive", "text", "ngrams"),
    "sdsat": ("adaptive",),  # the paper
    "ngrams": ("text", "ngrams"),
    "prompt_lookup": ("text",),
}
METHODS = ("plain", *SOURCES, *BY_DRAFT_MODEL)
BY_ADAPTIVE = ("hybrid", "sdsat")  # draft by adaptive tokens


@dataclass
class DecodeConfig:
    """How tokens are drafted and chosen, and when a text ends.

    Raises ValueError for a value out of range, for settings that contradict each other, and for those that
    the method does not have. Where no method is given the models decide on it: Methods.settled.
    """

    # plain, prompt_lookup, ngrams, hybrid (all sources of drafts), sdsat (the paper: adaptive tokens alone, two
    # forwards), ssd, tsd or gsd; null: gsd with a draft model, hybrid with adaptive tokens, ngrams with a table
    # of n-grams, else plain
    method: str | None = None
    # of drafts: adaptive (adaptive tokens), text (n-grams of the text so far), ngrams (of the training data);
    # null: all that the method and the model have
    sources: list[str] | None = None
    # drafts in a row (with probes=auto adaptive tokens in a row: n-grams go on behind them); of tsd and gsd
    # children of a node; null: L, 10 or 4
    k: int | None = None
    # where adaptive tokens draft: auto (by measurement; with sdsat root), root, all, or under a number of nodes
    probes: str = "auto"
    nodes: int | None = (
        None  # drafts in a tree; null: k, or with a draft model by measurement
    )
    width: int = 1  # candidates for each place of the tree
    # shape of a tree with width above 1: lattice (the likeliest paths, as auto has it) or paper (SDSAT 3.4.2)
    tree: str = "lattice"
    depth: int | None = None  # levels that a draft model draws; null: 10
    theta_prob: float | None = (
        None  # a node less likely than this gets no children; null: 0.2
    )
    theta_sib: float | None = (
        None  # one below this share of its best sibling's chance is dropped; null: 0.3
    )
    tau: int | None = (
        None  # tokens that must recur for nodes to be merged; null: 2 of gsd, never of others
    )
    # what tau counts: gram (the merged token and those before it, GSD 5.2) or preceding (those before it
    # alone, as in the authors' code: there tau=1 is what tau=2 is here, and tau=0 is possible)
    tau_reading: str = "gram"
    draft_rows: int | None = (
        None  # rows of the draft model in a step, at most; null: 992
    )
    verify: str = "pick"  # pick (the text without drafts) or ratio (another, of its distribution; GSD 3)
    temperature: float = 0.0  # of sampling; 0: the likeliest token
    top_p: float = (
        1.0  # only the likeliest tokens, of so much probability together; 1: all
    )
    top_k: int = 0  # only so many of the likeliest tokens; 0: all
    seed: int = 0  # of sampling: the same one gives the same text
    max_new_tokens: int = 256  # tokens to write, at most
    min_new_tokens: int = 0  # tokens to write at least: the end cannot come before
    repetition_penalty: float = (
        1.0  # makes tokens that were there less likely; 1: does not
    )
    no_repeat_ngram_size: int = (
        0  # so many tokens in a row never come twice; 0: they may
    )
    stop: list[str] = field(
        default_factory=list
    )  # texts that end the text, and are its end

    def __post_init__(self) -> None:
        self.probes = str(self.probes)  # a number of nodes may come as one
        if self.method == "sdsat" and self.probes == "auto":
            self.probes = "root"  # the paper measures nothing
        take_types(self, "decode")
        self._check_drafts()
        try:
            _ = self.sampling
        except ValueError as error:
            raise ValueError(f"decode.{error}") from error
        if not self.temperature and (self.top_k or self.top_p < 1):
            raise ValueError(
                "decode.temperature must be above 0 with decode.top_k or decode.top_p, got 0"
            )
        if self.verify not in ("pick", "ratio"):
            raise ValueError(
                f"decode.verify must be pick or ratio, got {self.verify or 'none'}"
            )
        if self.verify == "ratio" and not self.temperature:
            raise ValueError(
                "decode.temperature must be above 0 with decode.verify=ratio, got 0"
            )
        if self.method in BY_DRAFT_MODEL:
            self._check_drawn()
        elif self.method:
            self._check_undrawn()
        if not 0 <= self.seed < SEEDS:
            raise ValueError(
                f"decode.seed must be a number of up to 63 bits, got {self.seed}"
            )
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"decode.repetition_penalty must be above 0, got {self.repetition_penalty}"
            )
        least = {"max_new_tokens": 1, "min_new_tokens": 0, "no_repeat_ngram_size": 0}
        check_at_least(self, least, group="decode.")
        if self.min_new_tokens > self.max_new_tokens:
            most = f"decode.max_new_tokens={self.max_new_tokens}"
            raise ValueError(
                f"decode.min_new_tokens must be at most {most}, got {self.min_new_tokens}"
            )
        if "" in self.stop:
            raise ValueError("decode.stop must be texts, got an empty one")

    @property
    def sampling(self) -> Sampling:
        """The distribution that is drawn from."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    def _check_drafts(self) -> None:
        if self.method not in (None, *METHODS):
            raise ValueError(
                f"decode.method must be one of {', '.join(METHODS)}, got {self.method or 'none'}"
            )
        counts = ("k", "nodes", "width", "depth", "draft_rows")
        check_at_least(self, dict.fromkeys(counts, 1), group="decode.")
        check_growth(self, group="decode.")
        if (self.draft_rows or 0) > MOST_ROWS:
            raise ValueError(
                f"decode.draft_rows must be at most {MOST_ROWS}, got {self.draft_rows}"
            )
        self._check_sources()
        if self.tree not in TREES:
            raise ValueError(
                f"decode.tree must be {' or '.join(TREES)}, got {self.tree or 'nothing'}"
            )
        if self.probes not in ("auto", "root", "all") and not re.fullmatch(
            "[1-9][0-9]*", self.probes
        ):
            raise ValueError(
                f"decode.probes must be auto, root, all or a number of nodes from 1 on, got {self.probes}"
            )

    def _check_sources(self) -> None:
        if self.sources is None:
            return
        if self.method and self.method not in SOURCES:
            raise ValueError(
                f"decode.sources must be unset with decode.method={self.method}, got {self.sources}"
            )
        allowed = SOURCES[self.method or "hybrid"]
        if (
            not self.sources
            or len(set(self.sources)) < len(self.sources)
            or set(self.sources) - set(allowed)
        ):
            raise ValueError(
                f"decode.sources must be some of {', '.join(allowed)}, each once, got {self.sources}"
            )

    def _check_drawn(self) -> None:
        if self.width > 1 or self.tree != "lattice" or self.probes != "auto":
            names = "decode.width, decode.tree and decode.probes"
            raise ValueError(
                f"{names} need decode.method=hybrid or sdsat, got {self.method}"
            )
        if self.tau_reading != "gram" and self.method != "gsd":
            raise ValueError(
                f"decode.tau_reading needs decode.method=gsd, got {self.method}"
            )
        if self.tau is not None and self.method != "gsd":
            raise ValueError(
                f"decode.tau needs decode.method=gsd, which merges, got {self.method}"
            )
        if self.method == "ssd" and self.k not in (None, 1):
            raise ValueError(
                f"decode.k must be 1 with decode.method=ssd, a sequence, got {self.k}"
            )
        if self.method == "ssd" and self.theta_sib is not None:
            raise ValueError(
                "decode.theta_sib needs decode.method=tsd|gsd, which have siblings, got ssd"
            )

    def _check_undrawn(self) -> None:
        drawn = f"needs decode.method={'|'.join(BY_DRAFT_MODEL)}"
        given = [name for name in GROWN if getattr(self, name) is not None]
        if given:
            raise ValueError(f"decode.{given[0]} {drawn}, got {self.method}")
        if self.tau_reading != "gram":
            raise ValueError(f"decode.tau_reading {drawn}, got {self.method}")
        if self.verify == "ratio":
            raise ValueError(
                f"decode.verify=ratio {drawn}, whose drafts are drawn, got {self.method}"
            )
        shaped = self.nodes or self.width > 1
        if self.method not in BY_ADAPTIVE and (
            shaped or self.tree != "lattice" or self.probes != "auto"
        ):
            names = "decode.nodes, decode.width, decode.tree and decode.probes"
            raise ValueError(
                f"{names} need decode.method=hybrid or sdsat, got {self.method}"
            )
        if self.probes == "auto" and shaped:
            why = "got auto, which chooses the tree itself"
            raise ValueError(
                f"decode.nodes and decode.width need decode.probes=root, all or a number, {why}"
            )
        if self.tree == "paper":
            self._check_paper_tree()

    def _check_paper_tree(self) -> None:
        if self.probes == "auto":
            raise ValueError(
                "decode.probes must be root, all or a number with decode.tree=paper, got auto"
            )
        if self.width < RANKS:
            raise ValueError(
                f"decode.width must be at least {RANKS} with decode.tree=paper, got {self.width}"
            )
        if self.nodes is not None:
            why = "decode.tree=paper, whose size follows from k"
            raise ValueError(f"decode.nodes must be unset with {why}, got {self.nodes}")
        if self.k is not None and self.k > DEEPEST:
            raise ValueError(
                f"decode.k must be 1 to {DEEPEST} with decode.tree=paper, got {self.k}"
            )


def check_dtype(value: str, *, name: str = "dtype") -> None:
    """Raise ValueError for a dtype that weights cannot be read as."""
    if value not in DTYPES:
        raise ValueError(
            f"{name} must be one of {', '.join(DTYPES)}, got {value or 'none'}"
        )


def check_growth(config: Any, *, group: str = "") -> None:
    """Raise ValueError for thresholds or a tau that no graph of a draft model can have."""
    for name in ("theta_prob", "theta_sib"):
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{group}{name} must be between 0 and 1, got {value}")
    tau = config.tau
    reading = config.tau_reading
    if reading not in TAU_READINGS:
        raise ValueError(
            f"{group}tau_reading must be {' or '.join(TAU_READINGS)}, got {reading or 'nothing'}"
        )
    least = 1 if reading == "gram" else 0
    if tau is not None and tau < least:
        cure = f" Set {group}tau_reading=preceding for tau=0." if tau == 0 else ""
        raise ValueError(
            f"{group}tau must be at least {least} with {group}tau_reading={reading}, got {tau}.{cure}"
        )


def check_at_least(
    config: object, bounds: Mapping[str, int], *, group: str = ""
) -> None:
    """Raise ValueError for a setting below its bound; null has no bound."""
    for name, bound in bounds.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise ValueError(f"{group}{name} must be at least {bound}, got {value}")


@dataclass
class Infill:
    """Wanted: the text between `prefix` and `suffix`, in one of the orders that training has."""

    prefix: str = ""  # what stands before
    suffix: str = ""  # what stands behind
    order: str = "psm"  # psm (prefix, suffix, middle) or spm

    def __post_init__(self) -> None:
        take_types(self, "infill")
        if self.order not in ORDERS:
            raise ValueError(
                f"infill.order must be {' or '.join(ORDERS)}, got {self.order}"
            )


@dataclass
class DraftConfig:
    """The model that drafts: `draft=DIR`, or `draft=self:N` for the model's own first N layers.

    Raises ValueError for what can be neither, and for settings that contradict each other.
    """

    # a model directory or hub name, or self:N; null: no draft model
    model: str | None = field(default=None, metadata={"bare": True, **MODEL})
    adaptive: bool = False  # it drafts by its own adaptive tokens, in one forward
    dtype: str | None = None  # of its weights; null: the target's

    def __post_init__(self) -> None:
        take_types(self, "draft")
        if self.model is None and (self.adaptive or self.dtype):
            raise ValueError(
                "draft must be a model with draft.adaptive or draft.dtype, got none"
            )
        if self.model == "":
            raise ValueError("draft must be a model directory or self:N, got nothing")
        own = self.model is not None and self.model.startswith(SELF)
        if own and not self.layers:
            raise ValueError(
                f"draft must be self:N with N layers from 1 on, got {self.model}"
            )
        if self.dtype is not None:
            check_dtype(self.dtype, name="draft.dtype")
        if own and self.dtype:
            why = f"draft={self.model}, which has the target's own weights"
            raise ValueError(f"draft.dtype must be unset with {why}, got {self.dtype}")

    @property
    def layers(self) -> int | None:
        """N of self:N; None for a directory."""
        match = re.fullmatch(f"{SELF}0*([1-9][0-9]*)", self.model or "")
        return int(match[1]) if match else None


def _check_used(draft: DraftConfig, decode: DecodeConfig) -> None:
    if draft.model and decode.method not in (None, *BY_DRAFT_MODEL):
        raise ValueError(
            f"draft={draft.model} needs decode={'|'.join(BY_DRAFT_MODEL)}, got {decode.method}"
        )


@dataclass
class ModelSource:
    """A model directory or hub name."""

    # a Transformers directory, best an export, or a hub name
    path: str = field(default=MISSING, metadata={"bare": True, **MODEL})


@dataclass
class InferConfig:
    """python -m infer: continue a prompt, or write what is missing between a prefix and a suffix.

    Without a prompt it reads standard input.
    """

    model: ModelSource = field(default_factory=ModelSource)
    prompt: str = ""  # the text to continue; -: standard input
    prompt_file: str | None = field(
        default=None, metadata=PATH
    )  # the text to continue, in a file
    infill: Infill = field(default_factory=Infill)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    dtype: str = "auto"  # of the weights: float32, bfloat16, float16, or auto: by measurement (conf/dtype.py)
    device: str | None = None  # cpu or cuda:N; null: a GPU where there is one
    compile: bool = (
        False  # a GPU's forward by torch.compile: a minute first, then faster
    )
    threads: int | None = None  # of the CPU; null: the library's choice

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_at_least(self, {"threads": 1})
        _check_used(self.draft, self.decode)
        texts = {
            "prompt": self.prompt,
            "prompt_file": self.prompt_file,
            "infill": self.infill.prefix or self.infill.suffix,
        }
        given = [name for name, text in texts.items() if text]
        if len(given) > 1:
            raise ValueError(
                f"prompt must be given once, got {' and '.join(given)}. Leave all but one of them away."
            )


def check_directory(folder: str | Path, setting: str = "model") -> Path:
    """Return the path. Raises UserError for a folder that cannot be a model, without asking the hub."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        reason = "no config.json in it" if path.is_dir() else "no such directory"
        raise UserError(
            f"{setting}={folder} must be a Transformers model directory, got {reason}"
        )
    return path


def decontaminated(folder: str | Path) -> list[str] | None:
    """Return the benchmarks that the training data were decontaminated against.

    None for a directory that this project did not export.
    """
    path = Path(folder) / "manifest.json"
    manifest = json.loads(path.read_text()) if path.is_file() else {}
    return (
        manifest.get("decontaminated") or []
        if manifest.get("kind") == "model"
        else None
    )
