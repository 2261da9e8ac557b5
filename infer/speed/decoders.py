"""The decoders of a run: ours by the settings of infer.methods, and the names of the others. Pure."""

from dataclasses import replace
from typing import Any, NamedTuple

from infer.config import BY_DRAFT_MODEL, GROWTH, DecodeConfig
from infer.speed.config import SpeedConfig
from infer.trees.lattice import RANKS


class Group(NamedTuple):
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
    plain = DecodeConfig(
        "plain",
        temperature=temperature,
        top_k=config.top_k if temperature else 0,
        top_p=config.top_p if temperature else 1.0,
        max_new_tokens=config.max_new_tokens,
    )
    specs = {PLAIN: plain}
    for name in config.decoders:
        if name == "sdsat":
            for k in config.k:
                two = replace(plain, method="sdsat", sources=["adaptive"], probes="root", k=k)
                specs[DecoderSpec("sdsat", k)] = replace(two, width=RANKS, tree="paper") if temperature else two
        elif name == "adaptive":
            specs[DecoderSpec("adaptive")] = replace(plain, method="sdsat", sources=["adaptive"])
        elif name == "auto":
            specs[DecoderSpec("auto")] = replace(plain, method="sdsat")
        elif name == "ngrams":
            specs[DecoderSpec("ngrams")] = replace(plain, method="ngrams")
        elif name == "prompt_lookup":
            specs[DecoderSpec("prompt lookup")] = replace(plain, method="prompt_lookup")
        elif config.draft.model:
            specs[DecoderSpec(name)] = replace(plain, method=name, **_growth(config, name))
    if config.draft.adaptive and "gsd" in config.decoders:
        specs[DecoderSpec(GSD_PROBES)] = replace(plain, method="gsd")
    return specs


def _growth(config: SpeedConfig, method: str) -> dict[str, Any]:
    """Return the settings of a draft model's graph that the method has."""
    return {name: getattr(config, "children" if name == "k" else name) for name in GROWTH[method]}
