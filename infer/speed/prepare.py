"""What is read and checked before any weight is: tokenizers, prompts, and whether ids mean the same."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conf import UserError
from infer.benchmarks.prompts import TokenPrompt, load_prompts
from infer.drafters.adaptive import check_probes
from infer.models.checkpoint import Adaptive, has_adaptive, load_adaptive, load_text
from infer.models.draft import base_pieces, check_draft, lacking
from infer.speed.config import BY_ADAPTIVE, SpeedConfig
from infer.text import NoInfilling, Text


@dataclass(frozen=True)
class Prepared:
    """`shared` is `Draft.rows`, 0 without a draft model; `k` are those that the adaptive tokens allow;
    `skipped` are the sets that the model cannot read, and why.
    """

    text: Text
    adaptive: Adaptive | None
    prompts: Mapping[str, Sequence[TokenPrompt]]
    shared: int
    k: list[int]
    skipped: Mapping[str, str]


def prepare(config: SpeedConfig) -> Prepared:
    """Raises UserError for directories that are no models, for sdsat without adaptive tokens or only with more
    than there are, for what `load_prompts` and `check_draft` refuse, and for a base model of other ids.
    """
    text = load_text(config.model)
    adaptive = load_adaptive(config.model) if _probes(config) or has_adaptive(config.model) else None
    k = _possible(config.k, adaptive) if adaptive and "sdsat" in config.decoders else config.k
    shared = check_draft(config.draft, text) if config.draft.model else 0
    prompts, skipped = _read(config, text)
    if config.base:
        _check_base(config.base, text, [prompt for one in prompts.values() for prompt in one])
    return Prepared(text, adaptive, prompts, shared, k, skipped)


def _read(config: SpeedConfig, text: Text) -> tuple[dict[str, Sequence[TokenPrompt]], dict[str, str]]:
    """The prompts of each set, and why sets are left out: infillings of a model that knows none. Raises what
    the last of them does where no set is left.
    """
    prompts, skipped = dict[str, Sequence[TokenPrompt]](), dict[str, str]()
    for name, one in config.prompts.items():
        try:
            prompts[name] = load_prompts(name, one, text, seed=config.seed)
        except UserError as error:
            last = len(skipped) == len(config.prompts) - 1
            if last or not isinstance(error.__cause__, NoInfilling):
                raise
            skipped[name] = str(error.__cause__)
    return prompts, skipped


def fingerprint(prompts: Sequence[TokenPrompt]) -> str:
    """SHA-256 of a set's prompts: their names and token ids, and what ends their texts."""
    told = [(prompt.id, prompt.ids, sorted(prompt.ends), prompt.max_new_tokens) for prompt in prompts]
    return hashlib.sha256(repr(told).encode("utf-8", "surrogateescape")).hexdigest()


def _possible(asked: Sequence[int], adaptive: Adaptive) -> list[int]:
    """Of diverse tokens a model has no more than it was trained with (SDSAT, Appendix B)."""
    try:
        check_probes(adaptive.ids, min(asked))
    except ValueError as error:
        raise UserError(str(error)) from error
    return [k for k in asked if len(adaptive.ids) == 1 or k <= len(adaptive.ids)]


def _probes(config: SpeedConfig) -> bool:
    return not set(BY_ADAPTIVE).isdisjoint(config.decoders)


def _check_base(folder: str, text: Text, prompts: Sequence[TokenPrompt]) -> None:
    """Raises UserError where an id is another piece in the base model, and for a prompt that it cannot read."""
    strange = lacking(base_pieces(folder, text), ((prompt.id, prompt.ids) for prompt in prompts))
    if strange:
        raise UserError(f"base={folder}: wanted a model with the ids of every prompt, found {strange}")
