"""Verification by ratio end to end: a random target and a random draft model of five tokens, whose texts of
three tokens have a law that can be enumerated.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, SuppressTokensLogitsProcessor

from conf import UserError
from infer import load
from infer.api import generate
from infer.config import DecodeConfig, DraftConfig
from infer.drafters.budget import FamilyBudget
from infer.drafters.draft_model import RatioDrafters
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.loop import Limits, Step, decode
from infer.models.draft import Draft
from infer.trees.growth import Growth, Rules
from infer.trees.token_graph import Drafts, TokenGraph, unroll, unroll_levels
from tests.conftest import tiny_llama

V, LENGTH, SAMPLING = 5, 3, Sampling(0.8)
PROMPT = [3, 1, 4]
RULES = Rules(k=3, depth=3, theta_prob=0.05, theta_sib=0.1, tau=1)


def drafters(lm: PreTrainedModel, nodes: int, *, capacity: int = 12, static: bool = False) -> RatioDrafters:
    def take(batch: int) -> Runner:
        return Runner(lm, capacity=capacity, max_rows=80, batch=batch, static=static)

    draft, budget = Draft(lm, V, 512), Watched(nodes)
    return RatioDrafters(draft, RULES, budget, most=12, take=take, give=lambda runner: None)


class Watched(FamilyBudget):
    """Counts trees in which nodes share children."""

    shared = 0

    def verified(self, graph: TokenGraph, *, depth: int) -> Drafts:
        drafts = super().verified(graph, depth=depth)
        Watched.shared += len(set(drafts.nodes)) < len(drafts.nodes)
        return drafts


def tiny(seed: int, vocab: int = V) -> PreTrainedModel:
    """Logits close enough for every text to be drawn now and then."""
    lm = tiny_llama(vocab=vocab, seed=seed)
    with torch.no_grad():
        lm.lm_head.weight *= 0.6
    return lm


def the_law(lm: PreTrainedModel, suppressed: Sequence[int]) -> Tensor:
    """(V^3,) the probability of every text, by the library's own attention."""
    result, texts = torch.ones(1, dtype=torch.float64), torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(LENGTH):
            logits = lm(texts).logits[:, -1].double() / SAMPLING.temperature
            logits[:, suppressed] = float("-inf")
            result = (result[:, None] * logits.softmax(-1)).flatten()
            texts = torch.cat([texts.repeat_interleave(V, 0), torch.arange(V).repeat(len(texts))[:, None]], 1)
    return result


def texts(target: PreTrainedModel, new: Callable[[], RatioDrafters], requests: Sequence[Request]):
    """(n,) the three tokens behind each prompt in base V, and all steps."""
    runner = Runner(target, capacity=12, max_rows=31, batch=100)
    result, steps = torch.zeros(len(requests), dtype=torch.int64), list[Step]()
    for first in range(0, len(requests), 100):
        tokens: list[list[int]] = [[] for _ in requests[first : first + 100]]
        # One more, so that a draft has levels enough for the last to lie behind merged nodes.
        for subset in decode(runner, requests[first : first + 100], new(), Limits(LENGTH + 1), SAMPLING):
            for step in subset:
                tokens[step.sequence] += step.tokens
            steps += subset
        digits = torch.tensor(tokens)[:, :LENGTH] * V ** torch.arange(LENGTH - 1, -1, -1)
        result[first : first + 100] = digits.sum(1)
    return result, steps


@pytest.mark.parametrize("suppressed", [[], [2]])
def test_texts_are_distributed_as_the_targets(suppressed: list[int]) -> None:
    """Chi-square over 1,000 texts; the two models differ, and drafts are accepted all the same. Chains and
    trees have their law in test_ratio_texts.py.
    """
    target, draft = tiny(1), tiny(2)
    processors = LogitsProcessorList([SuppressTokensLogitsProcessor(suppressed)]) if suppressed else None
    requests, before = [Request(PROMPT, seed, processors) for seed in range(1000)], Watched.shared
    result, steps = texts(target, lambda: drafters(draft, 30), requests)
    assert sum(step.accepted for step in steps) > 0.2 * LENGTH * len(requests)
    assert Watched.shared - before > 300
    law = the_law(target, suppressed)
    counts, expected = torch.bincount(result, minlength=V**LENGTH), len(requests) * law
    assert counts[expected == 0].sum() == 0
    rare = expected < 5  # counted together
    counts = [*counts[~rare].tolist(), int(counts[rare].sum())]
    expected = [*expected[~rare].tolist(), float(expected[rare].sum())]
    assert stats.chisquare(counts, expected).pvalue > 0.001


def test_runs_repeat_whatever_stands_beside_them_and_in_fixed_shapes() -> None:
    """The draws of a sequence are its own: its seed's, from the first level on. In float64."""
    target, draft = tiny(1, vocab=9).double(), tiny(2).double()  # a draft model that lacks tokens
    requests = [Request(PROMPT[: 1 + seed % 3], seed) for seed in range(6)]

    def decoded(subset: Sequence[Request], **way: bool) -> list[list[int]]:
        runner = Runner(target, capacity=40, max_rows=16, batch=6, **way)
        result: list[list[int]] = [[] for _ in subset]
        new = drafters(draft, 14, capacity=40, **way)
        for steps in decode(runner, subset, new, Limits(30, [1]), SAMPLING):
            for step in steps:
                result[step.sequence] += step.tokens
        return result

    together = decoded(requests)
    assert together == [decoded([request])[0] for request in requests] == decoded(requests, static=True)
    assert len({tuple(tokens) for tokens in together}) > 3


@st.composite
def drawn(draw: st.DrawFn) -> tuple[TokenGraph, Rules]:
    """A graph that grew from draws of any order, its tokens few enough to recur."""
    rules = Rules(
        draw(st.integers(1, 4)), draw(st.integers(1, 5)), 0.05, 0.2, draw(st.sampled_from([None, 1, 2]))
    )
    growth = Growth(0, rules, most=draw(st.integers(1, 12)), within_level=True)
    chances = st.floats(0.01, 1.0)
    for _ in range(rules.depth):
        ids = [draw(st.permutations(range(4)))[: rules.k] for _ in growth.frontier]
        growth.grow(ids, [[draw(chances) for _ in row] for row in ids])
    return growth.graph, rules


def depth_of(graph: TokenGraph, node: int) -> int:
    return 1 + depth_of(graph, graph.parents[node]) if node else 0


@settings(max_examples=60)
@given(drawn())
def test_a_node_is_merged_before_anything_stands_behind_either(grown: tuple[TokenGraph, Rules]) -> None:
    graph, _ = grown
    for node, into in graph.merged.items():
        assert graph.tokens[node] == graph.tokens[into] and depth_of(graph, node) == depth_of(graph, into)
        assert all(child > node for child in graph.children[into])


@settings(max_examples=60)
@given(drawn(), st.integers(0, 40), st.integers(0, 5))
def test_families_stay_together(grown: tuple[TokenGraph, Rules], most: int, depth: int) -> None:
    """All children of a node or none, in their order, likelier parents first; all there are where they fit."""
    graph, _ = grown
    drafts = unroll_levels(graph, most, depth=depth)
    assert len(drafts.tokens) <= 1 + most and max(drafts.depths) <= depth
    assert drafts.depths == sorted(drafts.depths)
    count = len(drafts.tokens)
    for node in range(count):
        result = [drafts.nodes[child] for child in range(count) if drafts.parents[child] == node]
        assert result in ([], graph.children[drafts.nodes[node]])
        if not result and drafts.depths[node] < depth:
            assert (
                count + len(graph.children[drafts.nodes[node]]) > 1 + most
                or not graph.children[drafts.nodes[node]]
            )
    whole = unroll_levels(graph, 10**4, depth=depth)
    best_first = unroll(graph, [0.0] * 10**4, depth=depth)
    assert sorted(zip(whole.nodes, whole.chances)) == sorted(zip(best_first.nodes, best_first.chances))


def test_by_its_settings(model_dir: Path, base_dir: Path) -> None:
    model = load(model_dir, "float32", draft="self:1")
    sampled = {"temperature": 0.8, "verify": "ratio", "max_new_tokens": 12}
    for method in ("ssd", "tsd", "gsd"):
        steps = list(generate(model, [5, 6, 7], DecodeConfig(method, **sampled)))
        assert sum(len(step.tokens) for step in steps) <= 12 and any(step.drafted for step in steps)
    with pytest.raises(UserError, match=r"decode.verify=ratio needs decode.method=ssd\|tsd\|gsd.*got plain"):
        list(generate(load(base_dir, "float32"), [5], DecodeConfig(**sampled)))
    with pytest.raises(UserError, match="decode.verify=ratio needs .* token by token, got draft.adaptive"):
        adaptive = load(model_dir, "float32", draft=DraftConfig("self:1", adaptive=True))
        list(generate(adaptive, [5], DecodeConfig(**sampled)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verify": "both"}, "decode.verify must be pick or ratio, got both"),
        ({"verify": "ratio"}, "decode.temperature must be above 0 with decode.verify=ratio, got 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeConfig("gsd", **settings)
