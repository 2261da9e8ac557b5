"""Texts that grow longer than the draft model's context: they go on, without drafts."""

from copy import deepcopy

import pytest
from torch import nn

from infer.drafters.budget import FixedBudget
from infer.engine.output import Request
from infer.loop import Drafter, Drafters, Limits
from infer.models.checkpoint import Adaptive
from infer.models.draft import Draft
from tests.conftest import tiny_llama
from tests.infer.drafters.test_draft_model import a_draft_of, drafters_of, texts
from tests.infer.engine.test_families import tiny

METHODS = {"gsd": None, "probes": Adaptive((90,), 3)}


@pytest.mark.parametrize("method", METHODS)
def test_a_text_longer_than_the_draft_models_context_goes_on_without_drafts(method: str) -> None:
    lm = tiny_llama(seed=1).double()
    draft = a_draft_of(lm, 0.05, METHODS[method], context=20)
    check(lm, draft, method, [[5, 17, 3, 8, 9, 10], [44], list(range(2, 30))], 40)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("static", [False, True])
def test_no_learned_position_beyond_the_context_is_asked_for(method: str, static: bool) -> None:
    """The probes for a short text stood behind a text at the context's end too: an IndexError."""
    lm = tiny("opt").double()
    short = deepcopy(lm)
    positions = short.model.decoder.embed_positions
    positions.weight = nn.Parameter(positions.weight[: 2 + 40].detach())  # two rows for padding come first
    short.config.max_position_embeddings = 40
    draft = Draft(short, 97, 40, METHODS[method])
    check(lm, draft, method, [[5, 17, 3], list(range(2, 36))], 45, static=static)


def check(lm, draft: Draft, method: str, prompts: list[list[int]], n: int, **runner: bool) -> None:
    requests = [Request(prompt) for prompt in prompts]
    result, accepted = texts(lm, requests, drafters_of(draft, method, FixedBudget(12), **runner), Limits(n, []))
    assert accepted > 5
    for request, tokens in zip(requests, result):
        assert [tokens] == texts(lm, [request], Drafters(Drafter), Limits(n, []))[0]
