"""The drafters of a draft model by their settings: SSD, TSD, GSD, and its own adaptive tokens."""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from conf import UserError
from infer.config import DecodeConfig
from infer.drafters.auto import Learners
from infer.drafters.budget import AutoBudget, Budget, FamilyBudget, FixedBudget
from infer.drafters.cost_tables import CostTables
from infer.drafters.draft_model import UNREAD, LevelDrafters, ProbeDrafters, RatioDrafters
from infer.drafters.protocol import Drafters, Watch
from infer.engine.forward import WIDTH, context_length
from infer.engine.runner import Runner, Runners
from infer.models.draft import Draft
from infer.trees.growth import Rules

ROWS = 1024 - UNREAD  # of the draft model in a step; with the text's a power of two, as fixed shapes are
NODES = 64  # drafts that are verified where nothing is measured: by ratio, and to be shown
RULES = {"ssd": Rules(k=1, tau=None), "tsd": Rules(tau=None), "gsd": Rules()}


def rules_of(decode: DecodeConfig) -> Rules:
    """How a graph grows, by the settings; as in the paper (Appendix A) where they are silent."""
    assert decode.method in RULES
    given = {name: getattr(decode, name) for name in ("k", "depth", "theta_prob", "theta_sib", "tau")}
    rules = replace(RULES[decode.method], **{name: value for name, value in given.items() if value is not None})
    if decode.tau_reading == "preceding" and rules.tau is not None:
        return replace(rules, tau=rules.tau + 1)  # the merged token itself counts in Rules
    return rules


class DraftMethods:
    """A target and what drafts for it. Budgets that learn go on learning from one text to the next."""

    def __init__(self, lm: PreTrainedModel, draft: Draft, *, compile: bool = False) -> None:
        self._lm, self._draft = lm, draft
        self._runners = Runners(draft.lm, compile=compile, beside=lm)
        self._learners = Learners[AutoBudget]()

    def drafters(
        self,
        decode: DecodeConfig,
        *,
        batch: int,
        capacity: int,
        left: int,
        watch: Watch | None = None,
    ) -> Drafters:
        """As Methods.drafters, for a method that is one of RULES.

        Raises UserError for a k, depth or number of nodes that cannot be; and with draft.adaptive for more
        places than the draft model has diverse tokens for, for their candidates verified by ratio, and
        for settings that do nothing.
        """
        rules, most = rules_of(decode), decode.draft_rows or ROWS
        self._check(decode, rules, left)
        draft, give = self._draft, self._runners.give
        budget = self._budget(decode, batch, capacity)
        rows = UNREAD + most  # the text's tokens, and those of the graph

        def take(batch: int) -> Runner:
            return self._runners.take(batch=batch, capacity=capacity, max_rows=rows)

        if draft.adaptive is None:
            by_levels = RatioDrafters if decode.verify == "ratio" else LevelDrafters
            return by_levels(draft, rules, budget, most=most, take=take, give=give, watch=watch)
        depth = decode.depth or draft.adaptive.L + 1
        try:
            return ProbeDrafters(draft, budget, k=rules.k, depth=depth, take=take, give=give, watch=watch)
        except ValueError as error:
            raise UserError(f"decode.depth={depth}: with draft.adaptive, {error}") from error

    def _check(self, decode: DecodeConfig, rules: Rules, left: int) -> None:
        if self._draft.adaptive is not None:
            _check_adaptive(decode)
        bounds = {
            "k": (WIDTH, "children that a node can have"),
            "depth": (left, "tokens that the context has left"),
            "nodes": (context_length(self._lm.config), "positions of the model"),
        }
        for name, (most, what) in bounds.items():
            found = getattr(decode, name) or 0
            if found > most:
                raise UserError(f"decode.{name}: wanted at most the {most} {what}, found {found}")
        if decode.verify == "ratio" and (decode.nodes or NODES) < rules.k:
            raise UserError(
                f"decode.nodes: wanted at least decode.k={rules.k} with decode.verify=ratio, which verifies a "
                f"node's children together, found {decode.nodes}"
            )

    def _budget(self, decode: DecodeConfig, batch: int, capacity: int) -> Budget:
        if decode.verify == "ratio":
            return FamilyBudget(decode.nodes or NODES)
        if decode.nodes:
            return FixedBudget(decode.nodes)
        texts: dict[str, Any] = {"batch": batch, "capacity": capacity, "sampling": decode.sampling}
        tables = CostTables(self._lm, self._draft.lm, **texts)
        return self._learners.find(
            decode.method, **texts, load=tables.load, new=lambda both: AutoBudget(*both, save=tables.save)
        )


def _check_adaptive(decode: DecodeConfig) -> None:
    if decode.verify == "ratio":
        raise UserError(
            "decode.verify=ratio: wanted a draft model that draws token by token, found draft.adaptive=true"
        )
    if decode.method == "tsd":
        raise UserError(
            "decode.method: wanted gsd or ssd with draft.adaptive=true, which draws no trees, found tsd"
        )
    for name in ("theta_prob", "theta_sib", "tau", "draft_rows"):
        found = getattr(decode, name)
        if found is not None:
            raise UserError(
                f"decode.{name}: wanted none with draft.adaptive=true, which draws all in one forward, found "
                f"{found}"
            )
