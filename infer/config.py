"""The settings of `python -m infer`, and a check of the model directory.

This module does not import PyTorch, so that a wrong setting is reported at once.
"""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conf.errors import UserError, in_one_line
from conf.runs.files import check_regular
from conf.settings.schema import check_settings, setting
from infer.engine.sampling import SEEDS, Sampling
from infer.trees.growth import Rules

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
SELF = "self:"  # begins a draft setting that names the model's own first layers
ORDERS = (
    "psm",
    "spm",
)  # orders of the parts of an infilling prompt, as in conf.text.infilling
SOURCES = ("adaptive", "text", "ngrams")  # sources of drafts


@dataclass(frozen=True)
class Method:
    """A decoding method: its settings, its sources of drafts, and the size of its drafts.

    `sources` are the sources of drafts. A method with a draft model has `growth` instead, the
    default settings of the draft model's graph (GSD, Appendix A). Plain decoding has neither.
    If the method is `measured`, the number of drafts in a forward is chosen by measured costs,
    unless decode.nodes or decode.probes fixes it. In a tree of fixed size a place has up to
    `width` candidates.
    """

    settings: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    growth: Rules | None = None
    measured: bool = True
    width: int = 1


_GROWN = ("nodes", "depth", "theta_prob", "verify")
#: The decoding methods; infer/methods.py creates their drafters.
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
#: The settings that only some methods have.
METHOD_SETTINGS = sorted(
    {name for method in METHODS.values() for name in method.settings}
)


@dataclass
class DecodeConfig:
    """The decoding method and its drafts, the sampling, and the end of a text.

    Raises ValueError for a value out of range and for a setting that the method does not
    have. Without a method `Methods.resolve` chooses one by the models.
    """

    #: decoding method: plain, prompt_lookup, ngrams, hybrid (all sources of drafts), sdsat
    #: (as in the paper: adaptive tokens alone, two forwards), ssd, tsd or gsd; null: gsd with
    #: a draft model, else hybrid with adaptive tokens, else ngrams with a table of n-grams,
    #: else plain
    method: str | None = setting(None, choices=tuple(METHODS))
    #: sources of drafts: adaptive (adaptive tokens), text (n-grams of the text so far),
    #: ngrams (n-grams of the training data); null: all sources that the method and the
    #: model have
    sources: list[str] | None = setting(None, choices=SOURCES)
    #: maximum number of adaptive tokens in a row for hybrid and sdsat (k of SDSAT); null: the
    #: model's training window L
    k: int | None = setting(None, least=1)
    #: drafts that get adaptive tokens for the next step: auto (by measured costs; for sdsat
    #: root), root (the paper's two forwards in turn), all, or a number of drafts
    probes: str = "auto"
    #: shape of the drafts of sdsat: chain, or paper (the trees of SDSAT 3.4.2)
    tree: str = setting("chain", choices=("chain", "paper"))
    #: number of drafts in a forward, the likeliest ones; null: chosen by measured costs, but k
    #: in a row for hybrid if probes is not auto
    nodes: int | None = setting(None, least=1)
    #: children of a node in the draft model's graph for tsd and gsd (k of GSD); null: 4
    children: int | None = setting(None, least=1)
    #: number of levels that a draft model drafts; null: 10
    depth: int | None = setting(None, least=1)
    #: minimum probability of a draft model's node to get children; null: 0.2
    theta_prob: float | None = setting(None, least=0, most=1)
    #: minimum probability of a draft model's node, as a share of its likeliest sibling's;
    #: null: 0.3
    theta_sib: float | None = setting(None, least=0, most=1)
    #: length in tokens of an n-gram that must recur for gsd to merge two nodes, including the
    #: merged node's token (GSD 5.2; the paper's tables do not count it: 2 there is 3 here);
    #: null: 3
    tau: int | None = setting(None, least=1)
    #: verification: pick (the same text as without drafts) or ratio (another text from the same
    #: distribution, GSD 3)
    verify: str = setting("pick", choices=("pick", "ratio"))
    #: sampling temperature; 0: always the likeliest token
    temperature: float = setting(0.0, least=0)
    #: sample from the likeliest tokens with this total probability; 1: from all tokens
    top_p: float = setting(1.0, above=0, most=1)
    #: sample from this number of likeliest tokens; 0: from all tokens
    top_k: int = setting(0, least=0)
    #: seed of sampling; the same seed gives the same text
    seed: int = setting(0, least=0, below=SEEDS)
    #: maximum number of new tokens
    max_new_tokens: int = setting(256, least=1)
    #: minimum number of new tokens before EOS may end the text (a stop string may end it earlier);
    #: null: from the model's generation_config.json, else 0
    min_new_tokens: int | None = setting(None, least=0)
    #: penalty for tokens that are already in the text; 1: no penalty, above 1: they become less
    #: likely; null: from the model's generation_config.json, else 1
    repetition_penalty: float | None = setting(None, above=0)
    #: size in tokens of n-grams that may not occur twice; 0: no limit; null: from the model's
    #: generation_config.json, else 0
    no_repeat_ngram_size: int | None = setting(None, least=0)
    #: strings that end the output; the output includes the string; []: stop_strings of the
    #: model's generation_config.json, if any
    stop: list[str] = setting([])

    def __post_init__(self) -> None:
        self.probes = str(self.probes)  # YAML may give a number
        if self.method == "sdsat" and self.probes == "auto":
            self.probes = "root"  # as in the paper
        check_settings(self, "decode")
        if not re.fullmatch("auto|root|all|[1-9][0-9]*", self.probes):
            raise ValueError(
                f"decode.probes must be auto, root, all or a number of at least 1, got {self.probes}"
            )
        if not all(self.stop):
            raise ValueError("decode.stop must not contain an empty string. Remove it.")
        if not self.temperature and (self.top_k or self.top_p < 1):
            raise ValueError(
                "decode.temperature must be above 0 with decode.top_k or decode.top_p, got 0"
            )
        if not self.temperature and self.verify == "ratio":
            raise ValueError(
                "decode.temperature must be above 0 with decode.verify=ratio, got 0"
            )
        if (self.min_new_tokens or 0) > self.max_new_tokens:
            raise ValueError(
                "decode.min_new_tokens must be at most decode.max_new_tokens="
                f"{self.max_new_tokens}, got {self.min_new_tokens}. Lower it, or raise "
                "decode.max_new_tokens."
            )
        if self.sources == []:
            raise ValueError(
                "decode.sources must not be empty, got []. Omit it for all sources, or set decode=plain."
            )
        if self.method:
            self._check_method(METHODS[self.method])
        _ = self.sampling  # raises for a temperature that is too low

    @property
    def sampling(self) -> Sampling:
        """The settings of sampling."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def rules(self) -> Rules:
        """The settings of a draft model's graph; null settings have GSD's values (Appendix A)."""
        rules = METHODS[self.method or ""].growth
        assert rules is not None
        values = {
            "k": self.children,
            "depth": self.depth,
            "theta_prob": self.theta_prob,
            "theta_sib": self.theta_sib,
            "tau": self.tau,
        }
        values = {name: value for name, value in values.items() if value is not None}
        return replace(rules, **values)  # type: ignore[arg-type]

    def _check_method(self, method: Method) -> None:
        for name in METHOD_SETTINGS:
            value = getattr(self, name)
            if value != getattr(DecodeConfig, name) and name not in method.settings:
                supported = [
                    key for key, other in METHODS.items() if name in other.settings
                ]
                raise ValueError(
                    f"decode.{name} must be left out with decode.method={self.method}, got {value}. "
                    f"Methods with this setting: {', '.join(supported)}."
                )
        sources = self.sources or method.sources
        if not set(sources) <= set(method.sources):
            raise ValueError(
                f"decode.sources must be among {', '.join(method.sources)} "
                f"with decode.method={self.method}, got {', '.join(sources)}"
            )
        if method.sources and "adaptive" not in sources:
            for name, value in (("k", self.k), ("probes", self.probes)):
                if value not in (None, "auto"):
                    raise ValueError(
                        f"decode.{name} must be left out without adaptive in decode.sources, "
                        f"got {value}. Set decode.nodes for the number of drafts."
                    )
        elif self.nodes and "probes" in method.settings and self.probes == "auto":
            raise ValueError(
                f"decode.probes must be root, all or a number with decode.nodes={self.nodes}, got auto. "
                "Omit decode.nodes, since auto chooses the number of drafts, or set decode.probes."
            )


@dataclass
class Infill:
    """An infilling prompt: the model writes the text between `prefix` and `suffix`."""

    #: text before the infilled text
    prefix: str = ""
    #: text after the infilled text
    suffix: str = ""
    #: order of an infilling prompt: psm (prefix, suffix, middle) or spm (suffix, prefix,
    #: middle); null: psm, or spm if the model has only spm
    order: str | None = setting(None, choices=ORDERS)

    def __post_init__(self) -> None:
        check_settings(self, "infill")


def draft_layers(draft: str) -> int | None:
    """Return the number of layers N of a draft model self:N; None for a model directory.

    Raises ValueError for a draft model of neither form.
    """
    if not draft:
        raise ValueError("draft must be a model directory or self:N, got an empty name")
    if not draft.startswith(SELF):
        return None
    match = re.fullmatch(f"{SELF}0*([1-9][0-9]*)", draft)
    if not match:
        raise ValueError(f"draft must be self:N with N of at least 1, got {draft}")
    return int(match[1])


@dataclass
class InferConfig:
    """python -m infer: continue a prompt, or infill the text between a prefix and a suffix.

    Without a prompt it reads standard input.
    """

    #: model: a Transformers directory such as an export, a hub name, or a model with an
    #: adapter in this repository (smollm2, smollm2-uno, qwen2.5-coder-0.5b)
    model: str = setting(hub="model")
    #: GGUF file with the base model of smollm2, smollm2-uno or qwen2.5-coder-0.5b; null: from
    #: its Python package or the hub
    gguf: str | None = setting(None, path=True)
    #: the text to continue; -: read standard input
    prompt: str = ""
    #: file with the text to continue
    prompt_file: str | None = setting(None, path=True)
    #: format the prompt as a user's message with the model's chat template
    chat: bool = False
    infill: Infill = field(default_factory=Infill)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    #: draft model: a model directory or hub name with the same token ids, or self:N for the
    #: model's own first N layers; null: no draft model
    draft: str | None = setting(None, hub="model")
    #: type of the weights; auto: bfloat16 if the device has instructions for it, or on a CPU with a C
    #: compiler if the weights of a Llama, Mistral or Qwen2 model are stored in it, else float32;
    #: int8 (on a CPU): faster, with rounded weights, so texts differ from float32's, but every
    #: method gives the same text
    dtype: str = setting("auto", choices=DTYPES)
    #: device: cpu or cuda:N; null: the first GPU if there is one, else the CPU
    device: str | None = None
    #: compile a GPU's forward with torch.compile: faster after about a minute
    compile: bool = False
    #: number of CPU threads; null: PyTorch's default
    threads: int | None = setting(None, least=1, most=1024)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.draft is not None:
            draft_layers(self.draft)  # raises ValueError for a wrong setting
            if self.decode.method not in (None, *BY_DRAFT_MODEL):
                raise ValueError(
                    f"draft={self.draft} needs decode={'|'.join(BY_DRAFT_MODEL)}, got {self.decode.method}"
                )
        if self.chat and (self.infill.prefix or self.infill.suffix):
            raise ValueError(
                "chat must be false with infill.prefix or infill.suffix, got true. Omit it."
            )
        if self.infill.order and not (self.infill.prefix or self.infill.suffix):
            raise ValueError(
                f"infill.order={self.infill.order} needs infill.prefix or infill.suffix, got neither. "
                "Give one, or omit infill.order."
            )
        texts = {
            "prompt": self.prompt,
            "prompt_file": self.prompt_file,
            "infill": self.infill.prefix or self.infill.suffix,
        }
        names = [name for name, text in texts.items() if text]
        if len(names) > 1:
            raise ValueError(
                f"Give only one of prompt, prompt_file and infill; got {' and '.join(names)}."
            )


def check_directory(folder: str | Path, setting: str = "model") -> Path:
    """Return the path of a model directory. Raises UserError for another folder.

    It does not ask the hub. `setting` is the name of the setting in the error.
    """
    path = Path(folder)
    check_regular(path, setting, ["adapter"])
    if not (path / "config.json").is_file():
        reason = "no config.json in it" if path.is_dir() else "no such directory"
        raise UserError(
            f"{setting}={folder} must be a Transformers model directory, got {reason}. "
            "Check the path."
        )
    return path


def decontaminated(folder: str | Path) -> list[str] | None:
    """Return the benchmarks that the training data were decontaminated against.

    Return None for a directory that this project did not export. Raises as `export_manifest`.
    """
    manifest = export_manifest(folder)
    return None if manifest is None else manifest.get("decontaminated") or []


def export_manifest(folder: str | Path) -> dict[str, Any] | None:
    """Return the manifest of a directory that this project exported; None for another one.

    Raises UserError for a damaged file.
    """
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes()) if path.is_file() else None
    except ValueError as error:
        raise UserError(
            f"{path} must be JSON, got {in_one_line(error)}. Restore it, or export the model again."
        ) from error
    own = isinstance(manifest, dict) and manifest.get("kind") == "model"
    return manifest if own else None
