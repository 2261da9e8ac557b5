"""Verification by ratio end to end: a random target and a random draft model of five tokens, whose texts of
three tokens have a law that can be enumerated.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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

from conf import UserError
from infer import load
from infer.api import generate
from infer.config import DecodeConfig, DraftConfig
from infer.drafters.draft_model import DraftSetup, RatioDrafters
from infer.drafters.policy import FamilyBudget
from infer.drafters.stopwatch import Stopwatch
from infer.engine.output import Request
from infer.engine.pick import Logits, conditional_distribution, probabilities
from infer.engine.runner import Runner, Runners
from infer.engine.sampling import Sampling
from infer.loop import Limits, Step, decode
from infer.models.draft import Draft
from infer.trees.growth import Growth, Rules
from infer.trees.token_graph import TokenGraph, unroll, unroll_levels
from tests.conftest import tiny_llama
from tests.infer.library import collect

V, LENGTH, SAMPLING = 5, 3, Sampling(0.8)
PROMPT = [3, 1, 4]
RULES = Rules(k=3, depth=3, theta_prob=0.05, theta_sib=0.1, tau=1)
SHAPES = {  # of drafts, and how many nodes of one have children
    "chain": (replace(RULES, k=1), 12),
    "tree": (Rules(k=3, depth=3, theta_prob=0.0, theta_sib=0.0, tau=None), 99),
    "pruned tree": (replace(RULES, theta_prob=0.15, tau=None), 5),
    "graph": (RULES, 12),
    "pruned graph": (replace(RULES, theta_prob=0.15), 8),
    "wide graph": (replace(RULES, k=4), 8),
}


def drafters(
    lm: PreTrainedModel,
    nodes: int,
    shape: str = "graph",
    *,
    capacity: int = 12,
    static: bool = False,
) -> RatioDrafters:
    rules, max_rows = SHAPES[shape]
    setup = DraftSetup(
        Draft(lm, V, 512),
        FamilyBudget(nodes),
        Runners(lm, static=static),
        Stopwatch(lm),
        capacity=capacity,
        max_rows=max_rows,
    )
    return RatioDrafters(setup, rules)


def tiny(seed: int, vocab: int = V) -> PreTrainedModel:
    """Logits close enough for every text to be drawn now and then."""
    lm = tiny_llama(vocab=vocab, seed=seed)
    with torch.no_grad():
        lm.lm_head.weight *= 0.6
    return lm


def the_law(
    lm: PreTrainedModel, suppressed: Sequence[int], sampling: Sampling
) -> Tensor:
    """(V^3,) the probability of every text, by the library's own attention."""
    result, texts = torch.ones(1, dtype=torch.float64), torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(LENGTH):
            logits = lm(texts).logits[:, -1].double()
            logits[:, suppressed] = float("-inf")
            shares = probabilities(Logits(nn.Identity(), logits, logits), sampling)
            result = (result[:, None] * shares).flatten()
            texts = torch.cat(
                [
                    texts.repeat_interleave(V, 0),
                    torch.arange(V).repeat(len(texts))[:, None],
                ],
                1,
            )
    return result


def p_value(
    shape: str, suppressed: Sequence[int] = (), sampling: Sampling = SAMPLING
) -> float:
    """By chi-square over 2,500 texts. The two models differ; drafts are accepted and shared all the same."""
    target, draft, n = tiny(1), tiny(2), 2500
    processors = (
        LogitsProcessorList([SuppressTokensLogitsProcessor(suppressed)])
        if suppressed
        else None
    )
    runner, counts = (
        Runner(target, capacity=12, max_rows=121, batch=100),
        torch.zeros(V**LENGTH),
    )
    steps = list[Step]()
    for first in range(0, n, 100):
        requests = [Request(PROMPT, first + seed, processors) for seed in range(100)]
        new = drafters(draft, 30 if "graph" in shape else 120, shape)
        # One more, so that a draft has levels enough for the last to lie behind merged nodes.
        tokens, more = collect(
            decode(runner, requests, new, Limits(LENGTH + 1), sampling), 100
        )
        digits = torch.tensor(tokens)[:, :LENGTH] * V ** torch.arange(
            LENGTH - 1, -1, -1
        )
        counts += torch.bincount(digits.sum(1), minlength=V**LENGTH)
        steps += more
    assert sum(step.accepted for step in steps) > 0.2 * LENGTH * n
    assert any(step.shared for step in steps) == (shape in ("graph", "wide graph"))
    expected = n * the_law(target, suppressed, sampling)
    assert counts[expected == 0].sum() == 0
    groups = torch.where(
        expected < 5, 0, 1 + torch.arange(len(counts))
    )  # rare texts are counted together
    rows = [
        torch.zeros(1 + len(counts)).double().index_add(0, groups, x.double())
        for x in (counts, expected)
    ]
    return stats.chisquare(*(row[rows[1] > 0] for row in rows)).pvalue


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_are_distributed_as_the_targets(shape: str) -> None:
    assert p_value(shape) > 0.001


@pytest.mark.parametrize(
    ("sampling", "suppressed"),
    [(SAMPLING, [2]), (Sampling(0.7, 3), []), (Sampling(1.5, 0, 0.9), [])],
    ids=["processors", "top_k", "top_p"],
)
def test_what_cuts_the_distribution_cuts_the_texts(
    sampling: Sampling, suppressed: list[int]
) -> None:
    assert p_value("graph", suppressed, sampling) > 0.001


def test_the_test_has_teeth(monkeypatch: pytest.MonkeyPatch) -> None:
    """GSD §3 to the letter, without a residual: a token that no candidate becomes is generated anew."""

    def no_residual(p: Tensor, q: Tensor, ids: Tensor) -> Tensor:
        law = conditional_distribution(p, q, ids)
        rejected = 1 - law.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0).sum(
            1, keepdim=True
        )
        accepted = torch.zeros_like(law).scatter_add(1, ids, law.gather(1, ids))
        return accepted + rejected * p

    monkeypatch.setattr("infer.engine.output.conditional_distribution", no_residual)
    assert p_value("tree") < 1e-6


def test_runs_repeat_whatever_stands_beside_them_and_in_fixed_shapes() -> None:
    """The draws of a sequence are its own: its seed's, from the first level on. In float64."""
    target, draft = (
        tiny(1, vocab=9).double(),
        tiny(2).double(),
    )  # a draft model that lacks tokens
    requests = [Request(PROMPT[: 1 + seed % 3], seed) for seed in range(6)]

    def decoded(subset: Sequence[Request], **way: bool) -> list[list[int]]:
        runner = Runner(target, capacity=40, max_rows=16, batch=6, **way)
        new = drafters(draft, 14, capacity=40, **way)
        return collect(
            decode(runner, subset, new, Limits(30, [1]), SAMPLING), len(subset)
        )[0]

    together = decoded(requests)
    assert (
        together
        == [decoded([request])[0] for request in requests]
        == decoded(requests, static=True)
    )
    assert len({tuple(tokens) for tokens in together}) > 3


@st.composite
def drawn(draw: st.DrawFn) -> tuple[TokenGraph, Rules]:
    """A graph that grew from draws of any order, its tokens few enough to recur."""
    rules = Rules(
        draw(st.integers(1, 4)),
        draw(st.integers(1, 5)),
        0.05,
        0.2,
        draw(st.sampled_from([None, 1, 2])),
    )
    growth = Growth(0, rules, most=draw(st.integers(1, 12)), draws=True)
    chances = st.floats(0.01, 1.0)
    for _ in range(rules.depth):
        ids = [draw(st.permutations(range(4)))[: rules.k] for _ in growth.frontier]
        growth.grow(ids, [[draw(chances) for _ in row] for row in ids])
    return growth.graph, rules


def depth_of(graph: TokenGraph, node: int) -> int:
    return 1 + depth_of(graph, graph.parents[node]) if node else 0


@settings(max_examples=60)
@given(drawn())
def test_a_node_is_merged_before_anything_stands_behind_either(
    grown: tuple[TokenGraph, Rules],
) -> None:
    graph, _ = grown
    for node, into in graph.merged.items():
        assert graph.tokens[node] == graph.tokens[into] and depth_of(
            graph, node
        ) == depth_of(graph, into)
        assert all(child > node for child in graph.children[into])


@settings(max_examples=60)
@given(drawn(), st.integers(0, 40), st.integers(0, 5))
def test_families_stay_together(
    grown: tuple[TokenGraph, Rules], most: int, depth: int
) -> None:
    """All children of a node or none, in their order, likelier parents first; all there are where they fit."""
    graph, _ = grown
    drafts = unroll_levels(graph, most, depth=depth)
    assert len(drafts.tokens) <= 1 + most and max(drafts.depths) <= depth
    assert drafts.depths == sorted(drafts.depths)
    count = len(drafts.tokens)
    for node in range(count):
        result = [
            drafts.nodes[child]
            for child in range(count)
            if drafts.parents[child] == node
        ]
        assert result in ([], graph.children[drafts.nodes[node]])
        if not result and drafts.depths[node] < depth:
            assert (
                count + len(graph.children[drafts.nodes[node]]) > 1 + most
                or not graph.children[drafts.nodes[node]]
            )
    whole = unroll_levels(graph, 10**4, depth=depth)
    best_first = unroll(graph, [0.0] * 10**4, depth=depth)
    assert sorted(zip(whole.nodes, whole.chances)) == sorted(
        zip(best_first.nodes, best_first.chances)
    )


def test_by_its_settings(model_dir: Path, base_dir: Path) -> None:
    model = load(model_dir, "float32", draft="self:1")
    sampled = {"temperature": 0.8, "verify": "ratio", "max_new_tokens": 12}
    for method in ("ssd", "tsd", "gsd"):
        steps = list(generate(model, [5, 6, 7], DecodeConfig(method, **sampled)))
        assert sum(len(step.tokens) for step in steps) <= 12 and any(
            step.drafted for step in steps
        )
    with pytest.raises(
        UserError,
        match="decode.verify must be left out with decode.method=plain, got ratio",
    ):
        list(generate(load(base_dir, "float32"), [5], DecodeConfig(**sampled)))
    with pytest.raises(
        UserError,
        match="decode.verify must be left out with draft_adaptive=true, got ratio",
    ):
        adaptive = load(
            model_dir, "float32", draft=DraftConfig("self:1", adaptive=True)
        )
        list(generate(adaptive, [5], DecodeConfig(**sampled)))
