"""Drafters and logits processors by their settings."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from conf import UserError
from infer.config import BY_DRAFT_MODEL, SOURCES, DecodeConfig
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy, Policy, check_probes
from infer.drafters.auto import Learners, Policies
from infer.drafters.budget import AutoBudget, Budget, FamilyBudget, FixedBudget
from infer.drafters.cost_tables import CostTables
from infer.drafters.draft_model import (
    UNREAD,
    LevelDrafters,
    ProbeDrafters,
    RatioDrafters,
)
from infer.engine.forward import context_length
from infer.engine.runner import Runner, Runners
from infer.engine.static import WIDTH
from infer.loop import Drafter, Drafters
from infer.models.checkpoint import Adaptive
from infer.models.draft import Draft
from infer.ngrams import FILE, Ngrams, NgramTable, NgramWeights
from infer.trees.growth import Rules
from infer.trees.lattice import DEEPEST
from infer.trees.token_graph import Watch

ROWS = (
    1024 - UNREAD
)  # of the draft model in a step; with the text's a power of two, as fixed shapes are
NODES = (
    64  # drafts that are verified where nothing is measured: by ratio, and to be shown
)
RULES = {"ssd": Rules(k=1, tau=None), "tsd": Rules(tau=None), "gsd": Rules()}


def rules_of(decode: DecodeConfig) -> Rules:
    """Return how a graph grows, by the settings; as in the paper (Appendix A) where they are silent."""
    assert decode.method in RULES
    given = {
        name: getattr(decode, name)
        for name in ("k", "depth", "theta_prob", "theta_sib", "tau")
    }
    rules = replace(
        RULES[decode.method],
        **{name: value for name, value in given.items() if value is not None},
    )
    if decode.tau_reading == "preceding" and rules.tau is not None:
        return replace(
            rules, tau=rules.tau + 1
        )  # the merged token itself counts in Rules
    return rules


class DraftMethods:
    """A target and what drafts for it. Budgets that learn go on learning from one text to the next."""

    def __init__(
        self, lm: PreTrainedModel, draft: Draft, *, compile: bool = False
    ) -> None:
        self._lm = lm
        self._draft = draft
        self._runners = Runners(draft.lm, compile=compile, target=lm)
        self._learners = Learners()

    def drafters(
        self,
        decode: DecodeConfig,
        *,
        batch: int,
        capacity: int,
        left: int,
        watch: Watch | None = None,
    ) -> Drafters:
        """Return drafters as Methods.drafters does, for a method that is one of RULES."""
        rules = rules_of(decode)
        most = decode.draft_rows or ROWS
        self._check(decode, rules, left)
        draft = self._draft
        budget = self._budget(decode, batch, capacity)
        rows = UNREAD + most  # the text's tokens, and those of the graph

        def take(batch: int) -> Runner:
            return self._runners.take(batch=batch, capacity=capacity, max_rows=rows)

        give = self._runners.give
        if draft.adaptive is None:
            by_levels = RatioDrafters if decode.verify == "ratio" else LevelDrafters
            return by_levels(
                draft, rules, budget, most=most, take=take, give=give, watch=watch
            )
        depth = decode.depth or draft.adaptive.L + 1
        try:
            return ProbeDrafters(
                draft, budget, k=rules.k, depth=depth, take=take, give=give, watch=watch
            )
        except ValueError as error:
            raise UserError(
                f"decode.depth={depth}: with draft.adaptive, {error}"
            ) from error

    def _check(self, decode: DecodeConfig, rules: Rules, left: int) -> None:
        if self._draft.adaptive is not None:
            _check_adaptive(decode)
        bounds = {
            "k": (WIDTH, "children that a node can have"),
            "depth": (left, "tokens that the context has left"),
            "nodes": (context_length(self._lm.config), "positions of the model"),
        }
        for name, (most, what) in bounds.items():
            value = getattr(decode, name) or 0
            if value > most:
                raise UserError(
                    f"decode.{name} must be at most the {most} {what}, got {value}"
                )
        if decode.verify == "ratio" and (decode.nodes or NODES) < rules.k:
            least = f"decode.k={rules.k} with decode.verify=ratio, which verifies a node's children together"
            raise UserError(
                f"decode.nodes must be at least {least}, got {decode.nodes}"
            )

    def _budget(self, decode: DecodeConfig, batch: int, capacity: int) -> Budget:
        if decode.verify == "ratio":
            return FamilyBudget(decode.nodes or NODES)
        if decode.nodes:
            return FixedBudget(decode.nodes)
        sampling = decode.sampling
        tables = CostTables(
            self._lm, self._draft.lm, batch=batch, capacity=capacity, sampling=sampling
        )
        return self._learners.find(
            decode.method,
            batch=batch,
            capacity=capacity,
            sampling=sampling,
            load=tables.load,
            new=lambda both: AutoBudget(*both, save=tables.save),
        )


def _check_adaptive(decode: DecodeConfig) -> None:
    drawn = "draft.adaptive=true, which draws"
    if decode.verify == "ratio":
        by_token = "a draft model that draws token by token"
        raise UserError(
            f"decode.verify=ratio needs {by_token}, got draft.adaptive=true"
        )
    if decode.method == "tsd":
        raise UserError(
            f"decode.method must be gsd or ssd with {drawn} no trees, got tsd"
        )
    for name in ("theta_prob", "theta_sib", "tau", "draft_rows"):
        if (value := getattr(decode, name)) is not None:
            raise UserError(
                f"decode.{name} must be unset with {drawn} all in one forward, got {value}"
            )


LOOKED_UP = 10  # tokens that prompt lookup copies, where k is not given


class Methods:
    """Drafters for one model. The policy that learns serves all its sequences and goes on learning.

    `table` are the n-grams of the training data, where there are some.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        adaptive: Adaptive | None,
        draft_methods: DraftMethods | None = None,
        table: NgramTable | None = None,
    ) -> None:
        self._lm = lm
        self._adaptive = adaptive
        self._draft_methods = draft_methods
        self._table = table
        self._policies = Policies()

    def settled(self, decode: DecodeConfig) -> DecodeConfig:
        """Return the settings with the method that will run: by default gsd with a draft model, sdsat with
        adaptive tokens, ngrams with a table, else plain. Raises UserError for settings that it does not have.
        """
        if decode.method:
            return decode
        own = (
            "hybrid"
            if self._adaptive
            else "ngrams"
            if self._table or decode.sources
            else "plain"
        )
        try:
            return replace(decode, method="gsd" if self._draft_methods else own)
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
        """Return the drafters of `batch` sequences of up to `capacity` tokens, with `left` positions of the
        context behind the prompts. `watch` is called with drafts that are graphs.

        Raises UserError for what `settled` refuses, and for settings that the models or the context do not
        allow.
        """
        decode = self.settled(decode)
        method = decode.method
        if method == "plain":
            return Drafters(Drafter)
        if method in BY_DRAFT_MODEL:
            if self._draft_methods is None:
                cure = "Give draft=DIR or draft=self:N"
                raise UserError(
                    f"decode.method={method} needs a draft model, got none. {cure}"
                )
            return self._draft_methods.drafters(
                decode, batch=batch, capacity=capacity, left=left, watch=watch
            )
        sources = self._sources(decode)
        if "adaptive" in sources and self._adaptive is None:
            others = "decode=plain, decode=ngrams and decode=prompt_lookup need none"
            lacks = f"no adaptive.json in its directory ({others})"
            raise UserError(
                f"decode.method={method} needs a model fine-tuned with adaptive tokens, got {lacks}"
            )
        ids = self._adaptive.ids if self._adaptive and "adaptive" in sources else ()
        automatic = decode.probes == "auto" and (
            method == "hybrid" or (method == "ngrams" and not decode.k)
        )
        k = decode.k or min(
            self._adaptive.L if ids and self._adaptive else LOOKED_UP, left
        )
        if k > left and not automatic:  # auto takes k as a bound and goes below it
            raise UserError(
                f"decode.k must be at most the {left} tokens that the context has left, got {k}"
            )
        if decode.tree == "paper" and k > DEEPEST:
            raise UserError(
                f"decode.k must be 1 to {DEEPEST} with decode.tree=paper, got {k}"
            )
        try:
            if ids:
                check_probes(ids, k)
        except ValueError as error:
            raise UserError(f"decode.{error}") from error
        policy: Policy
        if automatic:
            sampling = decode.sampling
            tables = CostTables(
                self._lm, batch=batch, capacity=capacity, sampling=sampling
            )
            policy = self._policies.auto(
                k if ids else 0,
                sources,
                batch=batch,
                capacity=capacity,
                sampling=sampling,
                load=tables.load,
                save=tables.save,
            )
        else:
            probes = int(decode.probes) if decode.probes.isdigit() else decode.probes
            probes = "root" if probes == "auto" else probes
            policy = FixedPolicy(k, probes, decode.nodes, decode.width, decode.tree)
        ngrams = None if sources == {"adaptive"} else self._ngrams(sources)
        return Drafters(partial(AdaptiveDrafter, ids, policy, ngrams, watch))

    def _sources(self, decode: DecodeConfig) -> frozenset[str]:
        """Return the sources, by default all that the method and the model have. Raises UserError."""
        if "ngrams" in (decode.sources or ()) and self._table is None:
            lacks = f"this model, which has no {FILE}"
            raise UserError(
                f"decode.sources must be some of adaptive and text for {lacks}, got {decode.sources}"
            )
        sources = frozenset(decode.sources or SOURCES[decode.method or ""])
        return sources if self._table else sources - {"ngrams"}

    def _ngrams(self, sources: Collection[str]) -> Ngrams:
        weights = self._adaptive.ngrams if self._adaptive else NgramWeights()
        table = self._table if "ngrams" in sources else None
        vocabulary = self._lm.config.get_text_config().vocab_size
        return Ngrams(table, vocabulary, text="text" in sources, weights=weights)


def library_processors(
    decode: DecodeConfig, *, prompt: int, ends: Collection[int], device: torch.device
) -> LogitsProcessorList | None:
    """Return the library's processors, None for none; `min_new_tokens` holds the ids `ends` back."""
    processors: list[LogitsProcessor] = []
    if decode.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(decode.repetition_penalty))
    if decode.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(decode.no_repeat_ngram_size))
    if decode.min_new_tokens and ends:
        least = decode.min_new_tokens
        held = sorted(ends)
        processors.append(
            MinNewTokensLengthLogitsProcessor(prompt, least, held, device=str(device))
        )
    return LogitsProcessorList(processors) if processors else None
