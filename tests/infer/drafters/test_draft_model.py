"""Draft models: the text is plain decoding's, the drafts are the paper's, the cache is never rebuilt."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from infer.drafters.budget import AutoBudget, Budget, FixedBudget
from infer.drafters.costs import Costs
from infer.drafters.draft_model import UNREAD, DraftModelDrafters, LevelDrafters, ProbeDrafters
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafter, Drafters, Limits, Verified, decode
from infer.models.checkpoint import Adaptive
from infer.models.draft import Draft, first_layers
from infer.trees.growth import Rules
from infer.trees.token_graph import TokenGraph
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
COSTS = Costs((1, 2, 4, 8, 16, 32), (10.0, 10.0, 10.5, 11.0, 12.0, 14.0))


def a_draft_of(
    lm: PreTrainedModel, noise: float | str, adaptive: Adaptive | None = None, context: int = CONTEXT
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


def drafters_of(draft: Draft, method: str, budget: Budget, **runner: bool) -> DraftModelDrafters:
    def take(batch: int) -> Runner:
        return Runner(draft.lm, capacity=80, max_rows=ROWS + UNREAD, batch=batch, **runner)

    lend = {"take": take, "give": lambda runner: None}
    if draft.adaptive:
        return ProbeDrafters(draft, budget, k=3, depth=4, **lend)
    return LevelDrafters(draft, RULES[method], budget, most=ROWS, **lend)


def texts(lm, requests: Sequence[Request], drafters: Drafters, limits: Limits, sampling: Sampling = GREEDY):
    """The tokens of each, and how many were accepted drafts."""
    runner = Runner(lm, capacity=80, max_rows=drafters.max_rows, batch=len(requests))
    actual, steps = collect(decode(runner, requests, drafters, limits, sampling), len(requests))
    return actual, sum(step.accepted for step in steps)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(2, 96), min_size=1, max_size=12), min_size=1, max_size=3),
    st.sampled_from([*RULES, "probes"]),
    st.sampled_from(["fixed", "auto"]),
    st.sampled_from([GREEDY, Sampling(1.0), Sampling(0.7, 10, 0.95), Sampling(1.5, 0, 0.9)]),
    st.sampled_from([0.0, 0.1, 3.0, "first layer", "fewer ids"]),
    st.sampled_from([1, 2, 7, 40]),
    st.integers(0, 2),
)
def test_drafting_changes_no_token(prompts, method, budget, sampling, noise, n, seed) -> None:
    """Random models in float64, greedy and sampled: each sequence of a batch is what plain decoding gives
    it alone, whether the draft model is right always, often or never, or lacks ids that the text is full of.
    """
    lm = tiny_llama(seed=seed).double()
    draft = a_draft_of(lm, noise, Adaptive((45,), 3) if method == "probes" else None)
    drafters = drafters_of(draft, method, FixedBudget(12) if budget == "fixed" else AutoBudget(COSTS, COSTS))
    requests = [Request(prompt, seed + b) for b, prompt in enumerate(prompts)]
    actual, _ = texts(lm, requests, drafters, Limits(n, [1]), sampling)
    for request, tokens in zip(requests, actual):
        assert [tokens] == texts(lm, [request], Drafters(Drafter), Limits(n, [1]), sampling)[0]


@dataclass
class Recorder:
    """Every draft of the drafters it stands for, with the text it was made for."""

    drafters: DraftModelDrafters
    graphs: list[tuple[list[int], TokenGraph]] = field(default_factory=list)

    def __getattr__(self, name: str):
        return getattr(self.drafters, name)

    def propose(self, contexts: Sequence[Sequence[int]], left: Sequence[int]):
        trees = self.drafters.propose(contexts, left)
        for context, pending in zip(contexts, self.drafters._pending):
            if pending and min(left) > RULES["gsd"].depth:
                self.graphs.append((list(context), pending.graph))
        return trees


@pytest.mark.parametrize("method", ["tsd", "gsd"])
@pytest.mark.parametrize("static", [False, True])
def test_drafts_are_those_of_the_paper_word_for_word(method: str, static: bool) -> None:
    """While a batch is decoded, from the draft model's cache: node for node what a model without a cache,
    asked with every path anew, makes of §4 and §5.
    """
    lm = tiny_llama(seed=1).double()
    draft = a_draft_of(lm, 0.1)
    drafters = Recorder(drafters_of(draft, method, FixedBudget(12), static=static))
    requests = [Request([5, 17, 3]), Request([44, 6, 13, 70, 8]), Request([9])]
    _, accepted = texts(lm, requests, drafters, Limits(25, [1]))
    assert accepted > 10 and len(drafters.graphs) > 10
    for context, graph in drafters.graphs[::2]:
        nodes = literal.draw(context[-1], model_behind(draft.lm, context[:-1]), **vars(RULES[method]))
        assert graph.tokens == [node.token for node in nodes]
        assert len(graph.merged) == sum(node.into is not None for node in nodes)
    if method == "gsd":
        assert any(graph.merged for _, graph in drafters.graphs)


def model_behind(lm: PreTrainedModel, context: list[int], k: int = 5) -> literal.Model:
    def likeliest(path: tuple[int, ...]) -> list[tuple[int, float]]:
        chances, ids = by_library(lm, [*context, *path]).softmax(-1).topk(k)
        return [(int(id), float(chance)) for id, chance in zip(ids, chances)]

    return likeliest


@dataclass
class Reader:
    """What a draft model reads of one text in each step, in `read` and in front of the first new node, and
    what it had to: the new tokens less the accepted ones that it was fed as drafts.
    """

    drafters: DraftModelDrafters
    expected: list[int]
    read: list[int] = field(default_factory=list)

    def __getattr__(self, name: str):
        return getattr(self.drafters, name)

    def propose(self, contexts: Sequence[Sequence[int]], left: Sequence[int]):
        """The rows of the first level's forward are the text's; all forwards of a step feed each row once."""
        before, fed = 0, list[int]()
        read, forward = Runner.read, Runner.forward

        def counted(runner, texts):
            nonlocal before
            before += len(texts[0])
            read(runner, texts)

        def counted_rows(runner, trees, requests, sampling, fed_before):
            assert fed_before == [sum(fed)]
            fed.append(len(trees[0].tokens) - sum(fed))
            return forward(runner, trees, requests, sampling, fed_before)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "read", counted)
            patch.setattr(Runner, "forward", counted_rows)
            trees = self.drafters.propose(contexts, left)
        if fed:
            self.read.append(before + fed[0])
        return trees

    def observe(self, b: int, result: Verified) -> None:
        path = result.path
        pending = self.drafters._pending[b]
        if pending:
            fed = [node for node in path[1:] if pending.drafts.nodes[node] in pending.rows]
            self.expected.append(len(path) - len(fed))  # the path less its root, and the target's own token
        self.drafters.observe(b, result)


@pytest.mark.parametrize("prompt", [[5, 17, 3], [*range(2, 42)]])
def test_the_cache_keeps_what_was_accepted_and_is_never_rebuilt(prompt: list[int]) -> None:
    """Every token of a text is a row of the draft model once, but for drafts that were not accepted: the
    target itself drafts trees, in which nothing is merged and all accepted nodes but leaves were fed, so
    that a step reads the target's own token, and a leaf before it. A long prompt is read by itself.
    """
    lm = tiny_llama(seed=1).double()
    drafters = Reader(drafters_of(a_draft_of(lm, 0.0), "tsd", FixedBudget(16)), [len(prompt)])
    prefills, prefill = [], Runner.prefill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "prefill", lambda self, texts: (prefills.append(self), prefill(self, texts)))
        _, accepted = texts(lm, [Request(prompt)], drafters, Limits(38, []))
    assert len(prefills) == 2  # the target's and the draft model's, once
    assert accepted > 25 and len(drafters.read) > 7
    assert drafters.read == drafters.expected[: len(drafters.read)]
    assert set(drafters.read[1:]) == {1, 2}


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
        drafters.observe(0, Verified(tree, [0], token, None, 1, 0.0))
        context = [*context, token]
    drafters._budget = FixedBudget(12)
    (tree,) = drafters.propose([context], [9])
    graph = drafters._pending[0].graph
    nodes = literal.draw(context[-1], model_behind(draft.lm, context[:-1]), **vars(RULES["gsd"]))
    assert tree.drafted and graph.tokens == [node.token for node in nodes]


def test_the_probes_of_a_draft_model_draw_its_candidates_for_each_place() -> None:
    """One forward: the model's own next token, and what its probes say of the places behind."""
    lm = tiny_llama(seed=1).double()
    drafters = drafters_of(Draft(lm, 97, CONTEXT, Adaptive((90,), 3)), "probes", FixedBudget(40))
    context = [5, 17, 3, 60]
    drafters.start([Request(context)], GREEDY)
    drafters.propose([context], [9])
    graph = drafters._pending[0].graph
    places: list[list[int]] = [[] for _ in range(5)]
    for node in range(1, len(graph.tokens)):
        places[len(path_to(graph, node)) - 1].append(graph.tokens[node])
    for place in range(1, 5):
        expected = by_library(lm, [*context, *[90] * (place - 1)]).topk(3).indices
        assert places[place] == expected.tolist()
