"""Create the drafters of a method from its settings: a source of drafts and a planner.

config.METHODS describes the methods. `infer.generate` and the `custom_generate` of an export
both use this module.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from transformers import PreTrainedModel

from conf.errors import UserError
from infer.config import METHODS, DecodeConfig, Method
from infer.drafters.candidates import CandidateSource
from infer.drafters.drafting import SourceDrafters, Stopwatch
from infer.drafters.planner import (
    FAMILIES,
    LIKELIEST,
    PAPER,
    FixedPlanner,
    MeasuredPlanner,
    Planner,
    length_class,
    remember_planners,
)
from infer.drafters.source import Source
from infer.engine.forward import agreed_value
from infer.loop import Drafters
from infer.ngrams import FILE, Ngrams, NgramTable, NgramWeights
from infer.trees.mask_tokens import NO_MASK, MaskTokens
from infer.trees.nucleus import DEEPEST, RANKS
from infer.trees.token_graph import Watch

#: The number of drafts for verification by ratio, which does not measure costs.
NODES = 64


class DraftModel(Protocol):
    """The interface of a draft model; infer.drafters.draft_model.DraftModelSources implements it."""

    #: The expected time of the draft model's forward, in steps of plain decoding.
    forward: float

    def source(self, decode: DecodeConfig, *, capacity: int) -> Source:
        """Return the source of drafts of a method with a draft model.

        Raises UserError for settings that the method or the model does not support.
        """


@dataclass
class Methods:
    """The decoding methods of one model, by adaptive tokens (`mask`), n-grams or a draft model.

    `L` is the largest window of training. `table` has the n-grams of the training data; None
    for a model without a table. The planners keep their measurements from text to text.
    """

    lm: PreTrainedModel
    mask: MaskTokens = NO_MASK
    L: int = 1
    weights: NgramWeights = NgramWeights()
    table: NgramTable | None = None
    draft: DraftModel | None = None
    planners: Callable[..., MeasuredPlanner] = field(default_factory=remember_planners)

    def resolve(self, decode: DecodeConfig) -> DecodeConfig:
        """Return the settings with a method, by default the best method of the models.

        Raises UserError for settings that this method does not have.
        """
        if decode.method:
            return decode
        method = "plain"
        if self.draft:
            method = "gsd"
        elif self.mask:
            method = "hybrid"
        elif self.table or decode.sources:
            method = "ngrams"
        try:
            return replace(decode, method=method)
        except ValueError as error:
            raise UserError(str(error)) from error

    def drafters(
        self,
        decode: DecodeConfig,
        *,
        batch: int,
        capacity: int,
        left: int,
        watch: Watch | None = None,
    ) -> Drafters:
        """Return the drafters of `batch` sequences of up to `capacity` tokens.

        The context has `left` positions after the longest prompt. `watch` is called with the
        outcome of each draft. Raises UserError for settings that the method or the models do
        not support.
        """
        decode = self.resolve(decode)
        method = METHODS[decode.method or ""]
        texts = (decode.sampling, batch, length_class(capacity))
        if method.growth:
            source, planner = self._by_draft_model(decode, capacity, texts)
        elif method.sources:
            source, planner = self._by_sources(decode, method, left, texts)
        else:
            return Drafters()
        stopwatch = None
        if isinstance(planner, MeasuredPlanner):
            stopwatch = Stopwatch(partial(agreed_value, self.lm))
        return SourceDrafters(source, planner, stopwatch=stopwatch, watch=watch)

    def _by_draft_model(
        self, decode: DecodeConfig, capacity: int, texts: tuple[Hashable, ...]
    ) -> tuple[Source, Planner]:
        if self.draft is None:
            raise UserError(
                f"decode.method={decode.method} needs a draft model, got none. "
                "Give draft=DIR or draft=self:N."
            )
        source = self.draft.source(decode, capacity=capacity)
        planner: Planner
        if decode.verify == "ratio":  # whole families are verified
            nodes = max(decode.nodes or NODES, decode.rules.k)
            planner = FixedPlanner(nodes=nodes, form=FAMILIES)
        elif decode.nodes:
            planner = FixedPlanner(nodes=decode.nodes)
        else:
            device = self.lm.device.type
            planner = self.planners(
                device, 0, self.draft.forward, decode.method, *texts
            )
        return source, planner

    def _by_sources(
        self,
        decode: DecodeConfig,
        method: Method,
        left: int,
        texts: tuple[Hashable, ...],
    ) -> tuple[Source, Planner]:
        sources = self._sources(decode, method)
        mask = self.mask if "adaptive" in sources else NO_MASK
        k = min(decode.k or self.L, max(1, left)) if mask else 0
        if mask:
            try:
                mask.check(k)
            except ValueError as error:
                raise UserError(f"decode.{error}. Change decode.k.") from error
        planner: Planner
        if method.measured and not decode.nodes and decode.probes == "auto":
            planner = self.planners(self.lm.device.type, k, None, sources, *texts)
        else:
            planner = _fixed_planner(decode, method, k)
        ngrams = None
        if sources != {"adaptive"}:
            ngrams = Ngrams(
                self.table if "ngrams" in sources else None,
                self.lm.config.get_text_config().vocab_size,
                text="text" in sources,
                weights=self.weights,
            )
        source = CandidateSource(
            mask, planner.max_probes, width=planner.width, ngrams=ngrams
        )
        return source, planner

    def _sources(self, decode: DecodeConfig, method: Method) -> frozenset[str]:
        """Return the sources of drafts, by default all sources of the method and the model."""
        sources = frozenset(decode.sources or method.sources)
        if "adaptive" in sources and not self.mask:
            raise UserError(
                f"decode.method={decode.method} needs a model with adaptive.json, got a model "
                "without it. Use decode=plain, ngrams or prompt_lookup."
            )
        if "ngrams" in (decode.sources or ()) and self.table is None:
            raise UserError(
                f"decode.sources=ngrams needs {FILE} in the model directory. Copy the file, or "
                "use decode.sources=[text]."
            )
        return sources if self.table else sources - {"ngrams"}


def _fixed_planner(decode: DecodeConfig, method: Method, k: int) -> FixedPlanner:
    """Return a planner for decode.nodes drafts, else for a chain of k or the paper's tree."""
    probes = "root" if decode.probes == "auto" else decode.probes
    if decode.nodes:
        return FixedPlanner(k, probes, decode.nodes, method.width, LIKELIEST)
    if decode.tree == "chain":
        return FixedPlanner(k, probes)
    if k > DEEPEST:
        raise UserError(
            f"decode.k must be 1 to {DEEPEST} with decode.tree=paper, got {k}. Lower it."
        )
    return FixedPlanner(k, probes, width=RANKS, form=PAPER)
