"""Test verification by ratio: enumerate all texts of random models with five tokens."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    SuppressTokensLogitsProcessor,
)

from infer.drafters.draft_model import DraftSetup, RatioSource
from infer.drafters.drafting import SourceDrafters
from infer.drafters.planner import FAMILIES, FixedPlanner
from infer.engine.output import Request
from infer.engine.pick import Logits, probabilities
from infer.engine.runner import Runner, Runners
from infer.engine.sampling import Sampling
from infer.loop import Limits, Step, decode
from infer.models.draft import Draft
from infer.trees.growth import Growth, Rules
from infer.trees.token_graph import TokenGraph, unroll_levels
from tests.conftest import tiny_llama
from tests.infer.library import collect

V = 5
LENGTH = 3
PROMPT = [3, 1, 4]
RULES = Rules(k=3, depth=3, theta_prob=0.05, theta_sib=0.1, tau=1)


SHAPES = {  # of drafts, and how many nodes of one have children
    "tree": (Rules(k=3, depth=2, theta_prob=0.0, theta_sib=0.0, tau=None), 99),
    "pruned tree": (replace(RULES, theta_prob=0.15, tau=None), 5),
    "graph": (RULES, 12),
    "wide graph": (replace(RULES, k=4), 8),
}


def drafters(
    lm: PreTrainedModel, shape: str, nodes: int, static: bool = False
) -> SourceDrafters:
    rules, max_rows = SHAPES[shape]
    setup = DraftSetup(Draft(lm, V, 512), Runners(lm, static=static), 40, max_rows)
    planner = FixedPlanner(nodes=nodes, form=FAMILIES)
    return SourceDrafters(RatioSource(setup, rules), planner)


def tiny(seed: int, vocab: int = V) -> PreTrainedModel:
    """A model with logits close enough that every text is drawn sometimes."""
    lm = tiny_llama(vocab=vocab, seed=seed)
    with torch.no_grad():
        lm.lm_head.weight *= 0.6
    return lm


def distribution(
    lm: PreTrainedModel, suppressed: Sequence[int], sampling: Sampling
) -> Tensor:
    """Return the probability of every text (V^3,), by the library's own attention."""
    result = torch.ones(1, dtype=torch.float64)
    texts = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(LENGTH):
            logits = lm(texts).logits[:, -1].double()
            logits[:, suppressed] = float("-inf")
            shares = probabilities(Logits(nn.Identity(), logits, logits), sampling)
            result = (result[:, None] * shares).flatten()
            following = torch.arange(V).repeat(len(texts))[:, None]
            texts = torch.cat([texts.repeat_interleave(V, 0), following], 1)
    return result


@pytest.mark.parametrize(
    ("shape", "sampling", "suppressed"),
    [
        *((shape, Sampling(0.8), []) for shape in SHAPES),
        ("graph", Sampling(1.5, 4, 0.9), [2]),
    ],
)
def test_texts_are_distributed_as_the_targets(
    shape: str, sampling: Sampling, suppressed: list[int]
) -> None:
    """By chi-square over 2,500 texts, with drafts of another model."""
    target = tiny(1)
    draft = tiny(2)
    n = 2500
    processors = LogitsProcessorList()
    if suppressed:
        processors.append(SuppressTokensLogitsProcessor(suppressed))
    runner = Runner(target, capacity=12, max_rows=121, batch=100)
    counts = torch.zeros(V**LENGTH)
    places = V ** torch.arange(LENGTH - 1, -1, -1)
    steps: list[Step] = []
    for first in range(0, n, 100):
        requests = [Request(PROMPT, first + seed, processors) for seed in range(100)]
        new = drafters(draft, shape, 30 if "graph" in shape else 120)
        # One more token, so that a draft has levels after merged nodes.
        limits = Limits(LENGTH + 1)
        tokens, more = collect(decode(runner, requests, new, limits, sampling), 100)
        texts = (torch.tensor(tokens)[:, :LENGTH] * places).sum(1)
        counts += torch.bincount(texts, minlength=V**LENGTH)
        steps += more
    assert sum(step.accepted for step in steps) > 0.2 * LENGTH * n
    assert any(step.shared for step in steps) == ("graph" in shape)
    expected = n * distribution(target, suppressed, sampling)
    assert counts[expected == 0].sum() == 0
    rare = expected < 5  # counted together
    rows = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected)]
    assert stats.chisquare(*(row[rows[1] > 0] for row in rows)).pvalue > 0.001


def test_runs_repeat_whatever_stands_beside_them_and_in_fixed_shapes() -> None:
    """A sequence's draws depend on its seed alone. The draft model does not have all tokens."""
    target = tiny(1, vocab=9).double()
    draft = tiny(2).double()
    requests = [Request(PROMPT[: 1 + seed % 3], seed) for seed in range(6)]

    def decoded(subset: Sequence[Request], static: bool = False) -> list[list[int]]:
        runner = Runner(target, capacity=40, max_rows=16, batch=6, static=static)
        new = drafters(draft, "graph", 14, static)
        steps = decode(runner, subset, new, Limits(30, [1]), Sampling(0.8))
        return collect(steps, len(subset))[0]

    together = decoded(requests)
    assert together == [decoded([request])[0] for request in requests]
    assert together == decoded(requests, static=True)
    assert len({tuple(tokens) for tokens in together}) > 3


@st.composite
def drawn(draw: st.DrawFn) -> TokenGraph:
    """Draw a graph that grew from draws in any order, with few enough tokens that they recur."""
    tau = draw(st.sampled_from([None, 1, 2]))
    rules = Rules(draw(st.integers(1, 4)), draw(st.integers(1, 5)), 0.05, 0.2, tau)
    growth = Growth(0, rules, most=draw(st.integers(1, 12)), draws=True)
    chances = st.floats(0.01, 1.0)
    for _ in range(rules.depth):
        ids = [draw(st.permutations(range(4)))[: rules.k] for _ in growth.frontier]
        growth.grow(ids, [[draw(chances) for _ in row] for row in ids])
    return growth.graph


@settings(max_examples=60)
@given(drawn(), st.integers(0, 40), st.integers(0, 5))
def test_families_stay_together(graph: TokenGraph, most: int, depth: int) -> None:
    """All children of a node are drafted if they fit, otherwise no child."""
    drafts = unroll_levels(graph, most, depth=depth)
    count = len(drafts.tokens)
    assert count <= 1 + most and max(drafts.depths) <= depth
    assert drafts.depths == sorted(drafts.depths)
    for node in range(count):
        family = graph.children[drafts.nodes[node]]
        there = [n for n, parent in zip(drafts.nodes, drafts.parents) if parent == node]
        assert there in ([], family)
        if not there and drafts.depths[node] < depth:
            assert count + len(family) > 1 + most or not family
