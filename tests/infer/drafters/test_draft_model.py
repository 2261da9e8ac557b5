"""Draft models: the text equals plain decoding's, and the drafts equal the paper's."""

from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from infer.drafters.costs import prior_costs
from infer.drafters.draft_model import DraftSetup, LevelSource
from infer.drafters.drafting import SourceDrafters
from infer.drafters.planner import FixedPlanner, MeasuredPlanner, Planner
from infer.engine.output import Request
from infer.engine.runner import Runner, Runners
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafters, Limits, decode
from infer.models.draft import Draft, first_layers
from infer.trees.growth import Rules
from infer.trees.token_graph import TokenGraph
from infer.trees.tree import Tree
from tests.conftest import tiny_llama
from tests.infer.library import by_library, collect
from tests.infer.trees import literal

RULES = {
    "ssd": Rules(k=1, depth=4, theta_prob=0.05, tau=None),
    "tsd": Rules(k=3, depth=4, theta_prob=0.05, theta_sib=0.1, tau=None),
    "gsd": Rules(k=3, depth=4, theta_prob=0.05, theta_sib=0.1, tau=1),
}


def a_draft_of(lm: PreTrainedModel, noise: float | str, *, context: int = 512) -> Draft:
    """Return `lm` with noisy weights, its first layer, or a model with 50 ids, as a draft."""
    if noise == "first layer":
        return Draft(first_layers(lm, 1), lm.config.vocab_size, context)
    if noise == "fewer ids":
        return Draft(tiny_llama(vocab=50, seed=1).double(), 50, context)
    torch.manual_seed(1)
    off = deepcopy(lm)
    for parameter in off.parameters():
        parameter.data += noise * parameter.std() * torch.randn_like(parameter)
    return Draft(off, lm.config.vocab_size, context)


def drafters_of(
    draft: Draft, method: str, planner: Planner, static: bool | None = None
) -> SourceDrafters:
    setup = DraftSetup(draft, Runners(draft.lm, static=static), 80, 64)
    return SourceDrafters(LevelSource(setup, RULES[method]), planner)


def texts(
    lm: PreTrainedModel,
    requests: Sequence[Request],
    drafters: Drafters,
    limits: Limits,
    sampling: Sampling = GREEDY,
) -> tuple[list[list[int]], int]:
    """Return the tokens of each request and the number of accepted drafts."""
    runner = Runner(lm, capacity=80, max_rows=drafters.max_rows, batch=len(requests))
    decoded = decode(runner, requests, drafters, limits, sampling)
    tokens, steps = collect(decoded, len(requests))
    return tokens, sum(step.accepted for step in steps)


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.integers(2, 96), min_size=1, max_size=12), min_size=1, max_size=3
    ),
    st.sampled_from([*RULES]),
    st.sampled_from([FixedPlanner(nodes=12), None]),
    st.sampled_from([GREEDY, Sampling(1.0), Sampling(0.7, 10, 0.95)]),
    st.sampled_from([0.0, 0.1, 3.0, "first layer", "fewer ids"]),
    st.sampled_from([1, 2, 7, 40]),
    st.integers(0, 2),
    st.sampled_from([512, 20]),
)
def test_drafting_changes_no_token(
    prompts, method, planner, sampling, noise, n, seed, context
) -> None:
    """Holds in float64 for draft models that are always, often or never right, that have
    fewer ids, or that have a shorter context.
    """
    lm = tiny_llama(seed=seed).double()
    draft = a_draft_of(lm, noise, context=context)
    planner = planner or MeasuredPlanner(prior_costs("cuda"), forward=1.0)
    requests = [Request(prompt, seed + b) for b, prompt in enumerate(prompts)]
    limits = Limits(n, [1])
    drafters = drafters_of(draft, method, planner)
    actual, _ = texts(lm, requests, drafters, limits, sampling)
    for request, tokens in zip(requests, actual):
        plain, _ = texts(lm, [request], Drafters(), limits, sampling)
        assert plain == [tokens]


@pytest.mark.parametrize("method", ["tsd", "gsd"])
def test_drafts_are_those_of_the_paper_word_for_word(method: str) -> None:
    """Drafting with a cache gives the graph of a literal §4 and §5 without a cache."""
    lm = tiny_llama(seed=1).double()
    draft = a_draft_of(lm, 0.1)
    drafters = drafters_of(draft, method, FixedPlanner(nodes=12))
    propose = drafters.propose
    graphs: list[tuple[list[int], TokenGraph]] = []

    def recording(contexts: Sequence[Sequence[int]], left: Sequence[int]) -> list[Tree]:
        trees = propose(contexts, left)
        for context, proposal in zip(contexts, drafters._proposals):
            if proposal and len(context) < 25:
                graphs.append((list(context), proposal.graph.graph))
        return trees

    drafters.propose = recording  # type: ignore[method-assign]
    requests = [Request([5, 17, 3]), Request([44, 6, 13, 70, 8]), Request([9])]
    _, accepted = texts(lm, requests, drafters, Limits(30, [1]))
    assert accepted > 10 and len(graphs) > 10
    for context, graph in graphs[::4]:
        reference = model_after(draft.lm, context[:-1])
        nodes = literal.draw(context[-1], reference, **vars(RULES[method]))
        assert graph.tokens == [node.token for node in nodes]
        assert len(graph.merged) == sum(node.into is not None for node in nodes)
    if method == "gsd":
        assert any(graph.merged for _, graph in graphs)


def model_after(lm: PreTrainedModel, context: list[int], k: int = 5) -> literal.Model:
    def likeliest(path: tuple[int, ...]) -> list[tuple[int, float]]:
        chances, ids = by_library(lm, [*context, *path]).softmax(-1).topk(k)
        return [(int(id), float(chance)) for id, chance in zip(ids, chances)]

    return likeliest


@pytest.mark.parametrize("static", [False, True])
def test_no_learned_position_beyond_the_context_is_asked_for(static: bool) -> None:
    """Regression: in a batch, the rows of a short text followed a text at the context's end,
    so their positions were beyond the context: an IndexError.
    """
    # Imported here, because test_families imports this module.
    from tests.infer.engine.test_families import tiny

    lm = tiny("opt").double()
    short = deepcopy(lm)
    positions = short.model.decoder.embed_positions
    # Two rows for padding come first.
    positions.weight = nn.Parameter(positions.weight[: 2 + 40].detach())
    short.config.max_position_embeddings = 40
    draft = Draft(short, 97, 40)
    requests = [Request([5, 17, 3]), Request(list(range(2, 36)))]
    drafters = drafters_of(draft, "gsd", FixedPlanner(nodes=12), static=static)
    result, accepted = texts(lm, requests, drafters, Limits(45, []))
    assert accepted > 5
    for request, tokens in zip(requests, result):
        assert [tokens] == texts(lm, [request], Drafters(), Limits(45, []))[0]
