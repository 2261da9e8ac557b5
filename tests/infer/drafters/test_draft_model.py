"""Draft models: the text is plain decoding's, the drafts are the paper's, the cache is never rebuilt."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from infer.drafters.draft_model import (
    UNREAD,
    DraftModelDrafters,
    DraftSetup,
    LevelDrafters,
    ProbeDrafters,
)
from infer.drafters.policy import FixedBudget, MeasuredBudget, prior_costs
from infer.drafters.stopwatch import Stopwatch
from infer.engine.output import Request
from infer.engine.runner import Runner, Runners
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafter, Drafters, Limits, Verified, decode
from infer.models.checkpoint import Adaptive
from infer.models.draft import Draft, first_layers
from infer.trees.growth import Rules
from tests.conftest import tiny_llama
from tests.infer.library import by_library, collect
from tests.infer.trees import literal
from tests.infer.trees.test_growth import path_to

ROWS = 64
CONTEXT = 512
RULES = {
    "ssd": Rules(k=1, depth=4, theta_prob=0.05, tau=None),
    "tsd": Rules(k=3, depth=4, theta_prob=0.05, theta_sib=0.1, tau=None),
    "gsd": Rules(k=3, depth=4, theta_prob=0.05, theta_sib=0.1, tau=1),
}


def a_draft_of(
    lm: PreTrainedModel,
    noise: float | str,
    adaptive: Adaptive | None = None,
    context: int = CONTEXT,
) -> Draft:
    """A model that is often right about another: its weights, a little off; its first layer; one of 50 ids."""
    if noise == "first layer":
        return Draft(first_layers(lm, 1), lm.config.vocab_size, context, adaptive)
    if noise == "fewer ids":
        return Draft(tiny_llama(vocab=50, seed=1).double(), 50, context, adaptive)
    torch.manual_seed(1)
    off = deepcopy(lm)
    for parameter in off.parameters():
        parameter.data += noise * parameter.std() * torch.randn_like(parameter)
    return Draft(off, lm.config.vocab_size, context, adaptive)


def drafters_of(
    draft: Draft, method: str, budget: FixedBudget, static: bool | None = None
) -> DraftModelDrafters:
    runners = Runners(draft.lm, static=static)
    stopwatch = Stopwatch(draft.lm)
    setup = DraftSetup(draft, budget, runners, stopwatch, capacity=80, max_rows=ROWS)
    if draft.adaptive:
        return ProbeDrafters(setup, k=3, depth=4)
    return LevelDrafters(setup, RULES[method])


def texts(
    lm,
    requests: Sequence[Request],
    drafters: Drafters,
    limits: Limits,
    sampling: Sampling = GREEDY,
):
    """The tokens of each, and how many were accepted drafts."""
    runner = Runner(lm, capacity=80, max_rows=drafters.max_rows, batch=len(requests))
    actual, steps = collect(
        decode(runner, requests, drafters, limits, sampling), len(requests)
    )
    return actual, sum(step.accepted for step in steps)


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.integers(2, 96), min_size=1, max_size=12), min_size=1, max_size=3
    ),
    st.sampled_from([*RULES, "probes"]),
    st.sampled_from(["fixed", "auto"]),
    st.sampled_from(
        [GREEDY, Sampling(1.0), Sampling(0.7, 10, 0.95), Sampling(1.5, 0, 0.9)]
    ),
    st.sampled_from([0.0, 0.1, 3.0, "first layer", "fewer ids"]),
    st.sampled_from([1, 2, 7, 40]),
    st.integers(0, 2),
    st.sampled_from([CONTEXT, 20]),
)
def test_drafting_changes_no_token(
    prompts, method, budget, sampling, noise, n, seed, context
) -> None:
    """Random models in float64, greedy and sampled: each sequence of a batch is what plain decoding gives
    it alone, whether the draft model is right always, often or never, lacks ids, or has a shorter context.
    """
    lm = tiny_llama(seed=seed).double()
    draft = a_draft_of(
        lm, noise, Adaptive((45,), 3) if method == "probes" else None, context
    )
    drafters = drafters_of(
        draft,
        method,
        FixedBudget(12)
        if budget == "fixed"
        else MeasuredBudget(prior_costs("cuda"), 1.0),
    )
    requests = [Request(prompt, seed + b) for b, prompt in enumerate(prompts)]
    actual, _ = texts(lm, requests, drafters, Limits(n, [1]), sampling)
    for request, tokens in zip(requests, actual):
        assert [tokens] == texts(
            lm, [request], Drafters(Drafter), Limits(n, [1]), sampling
        )[0]


def recorded(
    drafters: DraftModelDrafters, record: Callable[[list[int], int], None]
) -> DraftModelDrafters:
    """The drafters, which call `record` with every text and its number, behind each of its drafts."""
    propose = drafters.propose

    def recording(contexts: Sequence[Sequence[int]], left: Sequence[int]) -> list[Any]:
        trees = propose(contexts, left)
        for b, context in enumerate(contexts):
            record(list(context), b)
        return trees

    drafters.propose = recording  # type: ignore[method-assign]
    return drafters


@pytest.mark.parametrize("method", ["tsd", "gsd"])
@pytest.mark.parametrize("static", [False, True])
def test_drafts_are_those_of_the_paper_word_for_word(method: str, static: bool) -> None:
    """Node for node, from the draft model's cache, what a model without a cache makes of §4 and §5."""
    lm = tiny_llama(seed=1).double()
    draft = a_draft_of(lm, 0.1)
    drafters, graphs = (
        drafters_of(draft, method, FixedBudget(12), static=static),
        list[Any](),
    )

    def record(context: list[int], b: int) -> None:
        if (pending := drafters._sequences[b].pending) and len(context) < 25:
            graphs.append((context, pending.graph))

    requests = [Request([5, 17, 3]), Request([44, 6, 13, 70, 8]), Request([9])]
    _, accepted = texts(lm, requests, recorded(drafters, record), Limits(30, [1]))
    assert accepted > 10 and len(graphs) > 10
    for context, graph in graphs[::2]:
        nodes = literal.draw(
            context[-1], model_behind(draft.lm, context[:-1]), **vars(RULES[method])
        )
        assert graph.tokens == [node.token for node in nodes]
        assert len(graph.merged) == sum(node.into is not None for node in nodes)
    if method == "gsd":
        assert any(graph.merged for _, graph in graphs)


def model_behind(lm: PreTrainedModel, context: list[int], k: int = 5) -> literal.Model:
    def likeliest(path: tuple[int, ...]) -> list[tuple[int, float]]:
        chances, ids = by_library(lm, [*context, *path]).softmax(-1).topk(k)
        return [(int(id), float(chance)) for id, chance in zip(ids, chances)]

    return likeliest


@pytest.mark.parametrize("prompt", [[5, 17, 3], [*range(2, 42)]])
def test_the_cache_keeps_what_was_accepted_and_is_never_rebuilt(
    prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token of a text is a row of the draft model once, but for drafts that were not accepted: where the
    target itself drafts trees, a step reads the target's own token, and a leaf before it.
    """
    lm, rows, read = (
        tiny_llama(seed=1).double(),
        list[int](),
        Mock(side_effect=Runner.read, autospec=True),
    )
    monkeypatch.setattr(Runner, "read", lambda self, texts: read(self, texts))
    drafters = drafters_of(a_draft_of(lm, 0.0), "tsd", FixedBudget(16))
    forward = drafters._forward

    def fed(*probes):
        before = drafters._sequences[0].pending.fed
        output = forward(*probes)
        if not before:
            rows.append(drafters._sequences[0].pending.fed)
        return output

    drafters._forward = fed
    _, accepted = texts(lm, [Request(prompt)], drafters, Limits(38, []))
    assert accepted > 25 and len(rows) > 7
    # Both models prefill; a long prompt is read by itself, up to its last token.
    assert (rows[0], read.call_count) == (
        (1, 3) if len(prompt) > UNREAD else (len(prompt), 2)
    )
    assert set(rows[1:]) == {1, 2}


class Never(FixedBudget):
    """A budget without credit."""

    drafting = False


def test_a_draft_model_that_rested_reads_on_and_drafts_as_if_it_had_not() -> None:
    lm = tiny_llama(seed=1).double()
    draft = a_draft_of(lm, 0.1)
    drafters = drafters_of(draft, "gsd", Never(12))
    context = [5, 17, 3]
    drafters.start([Request(context)], GREEDY)
    (text,), _ = texts(lm, [Request(context)], Drafters(Drafter), Limits(50, []))
    for token in text:
        (tree,) = drafters.propose([context], [60])
        assert tree.drafted == 0
        drafters.observe(0, Verified(tree, [0], token, None, 1))
        context = [*context, token]
    drafters._budget = FixedBudget(12)
    (tree,) = drafters.propose([context], [9])
    graph = drafters._sequences[0].pending.graph
    nodes = literal.draw(
        context[-1], model_behind(draft.lm, context[:-1]), **vars(RULES["gsd"])
    )
    assert tree.drafted and graph.tokens == [node.token for node in nodes]


def test_the_probes_of_a_draft_model_draw_its_candidates_for_each_place() -> None:
    """One forward: the model's own next token, and what its probes say of the places behind."""
    lm = tiny_llama(seed=1).double()
    drafters = drafters_of(
        Draft(lm, 97, CONTEXT, Adaptive((90,), 3)), "probes", FixedBudget(40)
    )
    context = [5, 17, 3, 60]
    drafters.start([Request(context)], GREEDY)
    drafters.propose([context], [9])
    graph = drafters._sequences[0].pending.graph
    places: list[list[int]] = [[] for _ in range(5)]
    for node in range(1, len(graph.tokens)):
        places[len(path_to(graph, node)) - 1].append(graph.tokens[node])
    for place in range(1, 5):
        expected = by_library(lm, [*context, *[90] * (place - 1)]).topk(3).indices
        assert places[place] == expected.tolist()


@pytest.mark.parametrize("method", ["gsd", "probes"])
@pytest.mark.parametrize("static", [False, True])
def test_no_learned_position_beyond_the_context_is_asked_for(
    method: str, static: bool
) -> None:
    """The probes for a short text stood behind a text at the context's end too: an IndexError."""
    from tests.infer.engine.test_families import tiny  # which imports this module

    lm = tiny("opt").double()
    short = deepcopy(lm)
    positions = short.model.decoder.embed_positions
    positions.weight = nn.Parameter(
        positions.weight[: 2 + 40].detach()
    )  # two rows for padding come first
    short.config.max_position_embeddings = 40
    draft = Draft(short, 97, 40, Adaptive((90,), 3) if method == "probes" else None)
    requests = [Request([5, 17, 3]), Request(list(range(2, 36)))]
    result, accepted = texts(
        lm,
        requests,
        drafters_of(draft, method, FixedBudget(12), static=static),
        Limits(45, []),
    )
    assert accepted > 5
    for request, tokens in zip(requests, result):
        assert [tokens] == texts(lm, [request], Drafters(Drafter), Limits(45, []))[0]
