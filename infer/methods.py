"""Drafters by their settings."""

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache

from transformers import PreTrainedModel

from conf import UserError
from infer.config import METHODS, DecodeConfig
from infer.drafters.budget import FamilyBudget, FixedBudget, MeasuredBudget
from infer.drafters.draft_model import (
    UNREAD,
    DraftSetup,
    LevelDrafters,
    ProbeDrafters,
    RatioDrafters,
)
from infer.drafters.estimates import prior_costs
from infer.drafters.policy import length_class
from infer.drafters.source_methods import SourceMethods
from infer.drafters.stopwatch import Stopwatch
from infer.engine.runner import Runners
from infer.engine.static import WIDTH
from infer.loop import Drafters
from infer.models.draft import Draft
from infer.trees.growth import Rules
from infer.trees.token_graph import Watch

#: Rows of the draft model in a step; with the text's a power of two, as fixed shapes are
ROWS = 1024 - UNREAD
#: Drafts that are verified by ratio, where nothing is measured
NODES = 64


def rules_of(decode: DecodeConfig) -> Rules:
    """Return how a graph grows; as in the paper (Appendix A) where settings are null."""
    rules = METHODS[decode.method or ""].growth
    assert rules is not None
    chosen = {
        name: value
        for name in ("k", "depth", "theta_prob", "theta_sib", "tau")
        if (value := getattr(decode, name)) is not None
    }
    return replace(rules, **chosen)


class DraftMethods:
    """A target and its draft model. Budgets learn from one text to the next."""

    def __init__(
        self, lm: PreTrainedModel, draft: Draft, *, compile: bool = False
    ) -> None:
        self._lm = lm
        self._draft = draft
        self._runners = Runners(draft.lm, compile=compile, target=lm)
        self._budget = lru_cache(64)(self._new_budget)

    def drafters(
        self,
        decode: DecodeConfig,
        *,
        batch: int,
        capacity: int,
        watch: Watch | None = None,
    ) -> Drafters:
        """Return drafters as Methods.drafters does, for a method with a draft model."""
        rules = rules_of(decode)
        if rules.k > WIDTH:
            raise UserError(f"decode.k must be at most {WIDTH} children, got {rules.k}")
        draft = self._draft
        setup = DraftSetup(
            draft,
            self._budget_of(decode, rules, batch, capacity),
            self._runners,
            Stopwatch(draft.lm, target=self._lm),
            capacity=capacity,
            max_rows=ROWS,
            watch=watch,
        )
        if draft.adaptive is None:
            by_levels = RatioDrafters if decode.verify == "ratio" else LevelDrafters
            return by_levels(setup, rules)
        for name in ("theta_prob", "theta_sib", "tau", "verify"):
            value = getattr(decode, name)
            if value != getattr(DecodeConfig, name):
                raise UserError(
                    f"decode.{name} must be left out with draft_adaptive=true, got {value}. "
                    "Adaptive tokens draft in one forward, without levels."
                )
        depth = decode.depth or draft.adaptive.L + 1
        try:
            return ProbeDrafters(setup, k=rules.k, depth=depth)
        except ValueError as error:
            raise UserError(f"decode.depth={depth}: {error}") from error

    def _budget_of(
        self, decode: DecodeConfig, rules: Rules, batch: int, capacity: int
    ) -> FixedBudget:
        if decode.verify == "ratio":  # whole families are verified
            return FamilyBudget(max(decode.nodes or NODES, rules.k))
        if decode.nodes:
            return FixedBudget(decode.nodes)
        return self._budget(
            decode.method, batch, length_class(capacity), decode.sampling
        )

    def _new_budget(self, *_texts: Hashable) -> MeasuredBudget:
        """Return a budget for one kind of texts."""
        target = self._lm
        draft = self._draft.lm
        # A small model's step is launches, by the layer; a large one's is weights.
        layers = [
            lm.config.get_text_config().num_hidden_layers for lm in (draft, target)
        ]
        weights = draft.num_parameters() / target.num_parameters()
        forward = min(1.0, max(weights, layers[0] / layers[1]))
        return MeasuredBudget(prior_costs(target.device.type), forward)


class Methods:
    """Drafters for one model, from sources or a draft model."""

    def __init__(
        self, sources: SourceMethods, draft_methods: DraftMethods | None = None
    ) -> None:
        self._sources = sources
        self._draft_methods = draft_methods

    def resolve(self, decode: DecodeConfig) -> DecodeConfig:
        """Return the settings with a method: by default the best that the models have.

        Raises UserError for settings that this method does not have.
        """
        if decode.method:
            return decode
        method = "plain"
        if self._draft_methods:
            method = "gsd"
        elif self._sources.ids:
            method = "hybrid"
        elif self._sources.table or decode.sources:
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
        if method.growth:
            if self._draft_methods is None:
                raise UserError(
                    f"decode.method={decode.method} needs a draft model, got none. "
                    "Give draft=DIR or draft=self:N."
                )
            return self._draft_methods.drafters(
                decode, batch=batch, capacity=capacity, watch=watch
            )
        if not method.sources:
            return Drafters()
        return self._sources.drafters(
            decode, batch=batch, capacity=capacity, left=left, watch=watch
        )
