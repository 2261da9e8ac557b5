"""The settings of `python -m infer`, and whether a folder can be a model directory. Knows no PyTorch: errors in
them are reported before its import.
"""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.runs.files import check_regular
from conf.settings.schema import check_settings, setting
from infer.engine.sampling import SEEDS, Sampling
from infer.trees.growth import Rules

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
SELF = "self:"  # the model's own first layers
ORDERS = ("psm", "spm")  # of an infilling's parts, as in conf.text.infilling
SOURCES = ("adaptive", "text", "ngrams")  # of drafts


@dataclass(frozen=True)
class Method:
    """A decoding method: what drafts, how much of it, and its settings.

    `sources` are its sources of drafts, or `growth` is how a draft model's graph grows by
    default (GSD, Appendix A); without both it is plain decoding. If it is `measured`, a
    forward verifies as many drafts as pay, unless decode.nodes or decode.probes says how
    many. A place has up to `width` candidates in a tree of fixed size.
    """

    settings: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    growth: Rules | None = None
    measured: bool = True
    width: int = 1


_GROWN = ("nodes", "depth", "theta_prob", "verify")
#: The methods, each a row: infer/methods.py makes their drafters.
METHODS = {
    "plain": Method(),
    "prompt_lookup": Method(("sources", "nodes"), ("text",)),
    "ngrams": Method(("sources", "nodes"), ("text", "ngrams"), width=2),
    "hybrid": Method(("sources", "nodes", "k", "probes"), SOURCES, width=4),
    "sdsat": Method(("sources", "k", "probes", "tree"), ("adaptive",), measured=False),
    "ssd": Method(_GROWN, growth=Rules(k=1, tau=None)),
    "tsd": Method((*_GROWN, "children", "theta_sib"), growth=Rules(tau=None)),
    "gsd": Method((*_GROWN, "children", "theta_sib", "tau"), growth=Rules()),
}
BY_DRAFT_MODEL = tuple(name for name, method in METHODS.items() if method.growth)
OWNED = sorted({name for method in METHODS.values() for name in method.settings})


@dataclass
class DecodeConfig:
    """How tokens are drafted and chosen, and when a text ends.

    Raises ValueError for a value out of range and for a setting that the method does
    not have. Without a method the models decide: see Methods.resolve.
    """

    #: plain, prompt_lookup, ngrams, hybrid (all sources of drafts), sdsat (the paper:
    #: adaptive tokens alone, two forwards), ssd, tsd or gsd; null: gsd with a draft
    #: model, hybrid with adaptive tokens, ngrams with a table of n-grams, else plain
    method: str | None = setting(None, choices=tuple(METHODS))
    #: Sources of drafts: adaptive (adaptive tokens), text (n-grams of the text so far),
    #: ngrams (of the training data); null: all that the method and the model have
    sources: list[str] | None = setting(None, choices=SOURCES)
    #: Adaptive tokens in a row of hybrid and sdsat, at most (k of SDSAT); null: the L
    #: that the model was trained for
    k: int | None = setting(None, least=1)
    #: Drafts under which adaptive tokens draft the next ones: auto (by measurement; of
    #: sdsat root), root (the two forwards of the paper), all, or a number of drafts
    probes: str = "auto"
    #: Drafts of sdsat: chain, or paper (the trees of SDSAT 3.4.2)
    tree: str = setting("chain", choices=("chain", "paper"))
    #: Drafts that a forward verifies, the likeliest ones; null: as many as pay, by
    #: measurement; of hybrid with probes=root, all or a number k in a row
    nodes: int | None = setting(None, least=1)
    #: Children of a node in the draft model's graph of tsd and gsd (k of GSD); null: 4
    children: int | None = setting(None, least=1)
    #: Levels that a draft model drafts; null: 10
    depth: int | None = setting(None, least=1)
    #: Nodes less likely than this have no children; null: 0.2
    theta_prob: float | None = setting(None, least=0, most=1)
    #: Nodes below this share of their likeliest sibling's chance leave; null: 0.3
    theta_sib: float | None = setting(None, least=0, most=1)
    #: Tokens that must recur for nodes to be merged, the merged one included (GSD 5.2;
    #: the paper's tables do not count it: their 2 is 3 here); null: 3
    tau: int | None = setting(None, least=1)
    #: pick (the text without drafts) or ratio (another of its distribution, GSD 3)
    verify: str = setting("pick", choices=("pick", "ratio"))
    #: Temperature of sampling; 0: the likeliest token
    temperature: float = setting(0.0, least=0)
    #: Sample from the likeliest tokens with this probability in all; 1: from all
    top_p: float = setting(1.0, above=0, most=1)
    #: Sample from so many of the likeliest tokens; 0: from all
    top_k: int = setting(0, least=0)
    #: Seed of sampling: the same one gives the same text
    seed: int = setting(0, least=0, below=SEEDS)
    #: Tokens to write, at most
    max_new_tokens: int = setting(256, least=1)
    #: Tokens to write at least: no end comes before; null: as generation_config.json of
    #: the model says, else 0
    min_new_tokens: int | None = setting(None, least=0)
    #: Above 1 tokens that were there before are less likely, 1: no penalty; null: as
    #: generation_config.json of the model says, else 1
    repetition_penalty: float | None = setting(None, above=0)
    #: No n-gram of so many tokens comes twice, 0: any may; null: as
    #: generation_config.json of the model says, else 0
    no_repeat_ngram_size: int | None = setting(None, least=0)
    #: Texts that end the text; they are its last part; []: stop_strings of the model's
    #: generation_config.json, if any
    stop: list[str] = setting([])

    def __post_init__(self) -> None:
        self.probes = str(self.probes)  # a number is taken as well
        if self.method == "sdsat" and self.probes == "auto":
            self.probes = "root"  # as in the paper
        check_settings(self, "decode")
        if not re.fullmatch("auto|root|all|[1-9][0-9]*", self.probes):
            raise ValueError(
                f"decode.probes must be auto, root, all or a number of drafts from 1 on, got {self.probes}"
            )
        if not all(self.stop):
            raise ValueError("decode.stop must be texts, got an empty one")
        if not self.temperature and (self.top_k or self.top_p < 1):
            raise ValueError(
                "decode.temperature must be above 0 with decode.top_k or decode.top_p, got 0"
            )
        if not self.temperature and self.verify == "ratio":
            raise ValueError(
                "decode.temperature must be above 0 with decode.verify=ratio, got 0"
            )
        if self.method:
            self._check_method(METHODS[self.method])
        _ = self.sampling  # raises for a temperature that is too low

    @property
    def sampling(self) -> Sampling:
        """The distribution that is drawn from."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def rules(self) -> Rules:
        """How a draft model's graph grows; as in GSD (Appendix A) where settings are null."""
        rules = METHODS[self.method or ""].growth
        assert rules is not None
        given = {
            "k": self.children,
            "depth": self.depth,
            "theta_prob": self.theta_prob,
            "theta_sib": self.theta_sib,
            "tau": self.tau,
        }
        given = {name: value for name, value in given.items() if value is not None}
        return replace(rules, **given)  # type: ignore[arg-type]

    def _check_method(self, method: Method) -> None:
        for name in OWNED:
            value = getattr(self, name)
            if value != getattr(DecodeConfig, name) and name not in method.settings:
                others = [
                    key for key, other in METHODS.items() if name in other.settings
                ]
                raise ValueError(
                    f"decode.{name} must be left out with decode.method={self.method}, got {value}. "
                    f"Methods that have it: {', '.join(others)}."
                )
        sources = self.sources or method.sources
        if not set(sources) <= set(method.sources):
            raise ValueError(
                f"decode.sources must be some of {', '.join(method.sources)} "
                f"with decode.method={self.method}, got {', '.join(sources)}"
            )
        if method.sources and "adaptive" not in sources:
            for name, value in (("k", self.k), ("probes", self.probes)):
                if value not in (None, "auto"):
                    raise ValueError(
                        f"decode.{name} must be left out without adaptive tokens among decode.sources, "
                        f"got {value}. decode.nodes sets the number of drafts."
                    )
        elif self.nodes and "probes" in method.settings and self.probes == "auto":
            raise ValueError(
                f"decode.probes must be root, all or a number with decode.nodes={self.nodes}, got auto. "
                "auto measures how many drafts pay: leave decode.nodes out, or choose where the probes hang."
            )


@dataclass
class Infill:
    """Wanted: the text between `prefix` and `suffix`."""

    #: text before
    prefix: str = ""
    #: text behind
    suffix: str = ""
    #: psm (prefix, suffix, middle) or spm; null: psm, unless the model has spm alone
    order: str | None = setting(None, choices=ORDERS)

    def __post_init__(self) -> None:
        check_settings(self, "infill")


@dataclass
class DraftConfig:
    """The model that drafts: a model directory, or self:N for the model's own first N layers.

    `adaptive` has it draft by its own adaptive tokens, in one forward. Raises ValueError for a `model` that can
    be neither, and for `adaptive` without one.
    """

    model: str | None = None
    adaptive: bool = False

    def __post_init__(self) -> None:
        if self.model is None and self.adaptive:
            raise ValueError("draft must be a model with draft_adaptive=true, got none")
        if self.model == "":
            raise ValueError("draft must be a model directory or self:N, got nothing")
        if (self.model or "").startswith(SELF) and not self.layers:
            raise ValueError(
                f"draft must be self:N with N layers from 1 on, got {self.model}"
            )

    @property
    def layers(self) -> int | None:
        """N of self:N; None for a directory."""
        match = re.fullmatch(f"{SELF}0*([1-9][0-9]*)", self.model or "")
        return int(match[1]) if match else None


@dataclass
class InferConfig:
    """python -m infer: continue a prompt, or write what is missing between a prefix and a suffix.

    Without a prompt it reads standard input.
    """

    #: a Transformers directory, best an export, a hub name, or a model with its adapter in
    #: this repository: smollm2, qwen2.5-coder-0.5b
    model: str = setting(hub="model")
    #: the GGUF file of the base model of smollm2 or qwen2.5-coder-0.5b; null: its package,
    #: or the hub
    gguf: str | None = setting(None, path=True)
    #: the text to continue; -: standard input
    prompt: str = ""
    #: the text to continue, in a file
    prompt_file: str | None = setting(None, path=True)
    #: answer the prompt as a user's message, by the model's chat template
    chat: bool = False
    infill: Infill = field(default_factory=Infill)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    #: the model that drafts: a model directory or hub name with the same token ids, or
    #: self:N for the model's own first N layers
    draft: str | None = setting(None, hub="model")
    #: the draft model drafts by its own adaptive tokens, in one forward
    draft_adaptive: bool = False
    #: of the weights; auto: bfloat16 where the device has instructions for it, else float32; int8: on a CPU,
    #: faster, by rounded weights: other texts than float32's, the same by every method
    dtype: str = setting("auto", choices=DTYPES)
    #: cpu or cuda:N; null: a GPU where there is one
    device: str | None = None
    #: a GPU's forward by torch.compile: a minute first, then faster
    compile: bool = False
    #: of the CPU; null: the library's choice
    threads: int | None = setting(None, least=1)

    def __post_init__(self) -> None:
        check_settings(self)
        draft = DraftConfig(self.draft, self.draft_adaptive)
        if draft.model and self.decode.method not in (None, *BY_DRAFT_MODEL):
            raise ValueError(
                f"draft={draft.model} needs decode={'|'.join(BY_DRAFT_MODEL)}, got {self.decode.method}"
            )
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
    check_regular(path, setting, ["adapter"])
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
    manifest = export_manifest(folder)
    return None if manifest is None else manifest.get("decontaminated") or []


def export_manifest(folder: str | Path) -> dict[str, Any] | None:
    """Return the manifest of a directory that this project exported, None for others."""
    path = Path(folder) / "manifest.json"
    manifest = json.loads(path.read_text()) if path.is_file() else {}
    return manifest if manifest.get("kind") == "model" else None
