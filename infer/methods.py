"""Drafters by their settings: a method is a source of drafts with a planner.

config.METHODS has a row for each method, and this module the one rule that makes its
drafters. `infer.generate` and the `custom_generate` of an export share it.
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
from infer.trees.lattice import DEEPEST, RANKS
from infer.trees.mask_tokens import NO_MASK, MaskTokens
from infer.trees.token_graph import Watch

#: Drafts that are verified by ratio, where nothing is measured
NODES = 64


class DraftModel(Protocol):
    """A draft model as a source; infer.drafters.draft_model.DraftModelSources is one."""

    #: The expected time of its forward in plain steps
    forward: float

    def source(self, decode: DecodeConfig, *, capacity: int) -> Source:
        """Return the source of a method with a draft model.

        Raises UserError for settings that the method or the model does not have.
        """


@dataclass
class Methods:
    """Drafters of one model, from adaptive tokens (`mask`), n-grams or a draft model.

    `L` is the widest window of training, `table` the n-grams of the training data, if
    there are some. The planners learn from one text to the next.
    """

    lm: PreTrainedModel
    mask: MaskTokens = NO_MASK
    L: int = 1
    weights: NgramWeights = NgramWeights()
    table: NgramTable | None = None
    draft: DraftModel | None = None
    planners: Callable[..., MeasuredPlanner] = field(default_factory=remember_planners)

    def resolve(self, decode: DecodeConfig) -> DecodeConfig:
        """Return the settings with a method: by default the best that the models have.

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

        The context has `left` positions behind the prompts. `watch` is called with
        drafts that are graphs. Raises UserError for settings that the method or the
        models do not have.
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
                raise UserError(f"decode.{error}") from error
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
        """Return the sources, by default all that the method and the model have."""
        sources = frozenset(decode.sources or method.sources)
        if "adaptive" in sources and not self.mask:
            raise UserError(
                f"decode.method={decode.method} needs a model with adaptive.json, got "
                "none. Use decode=plain, ngrams or prompt_lookup."
            )
        if "ngrams" in (decode.sources or ()) and self.table is None:
            raise UserError(
                f"decode.sources=ngrams needs {FILE} in the model directory, got none. "
                "Use decode.sources=[text]."
            )
        return sources if self.table else sources - {"ngrams"}


def _fixed_planner(decode: DecodeConfig, method: Method, k: int) -> FixedPlanner:
    """Return a planner of decode.nodes, else of k in a row or the paper's tree."""
    probes = "root" if decode.probes == "auto" else decode.probes
    if decode.nodes:
        return FixedPlanner(k, probes, decode.nodes, method.width, LIKELIEST)
    if decode.tree == "chain":
        return FixedPlanner(k, probes)
    if k > DEEPEST:
        raise UserError(
            f"decode.k must be 1 to {DEEPEST} with decode.tree=paper, got {k}"
        )
    return FixedPlanner(k, probes, width=RANKS, form=PAPER)
