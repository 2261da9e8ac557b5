"""Test trees, batches, commits and parts of trees against the library's forward of a path."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from infer.engine.output import Request
from infer.engine.runner import Runner, Runners
from infer.engine.sampling import GREEDY
from infer.trees.tree import Tree
from tests.conftest import tiny_llama
from tests.infer.engine.test_families import tiny_family
from tests.infer.library import BOTH_SHAPES, by_library, logits_of
from tests.infer.trees.test_tree import path_to, trees

PROMPT = [5, 17, 3, 88, 41, 22, 60, 9]
MODELS = {f"{heads} key-value heads": tiny_llama(kv_heads=heads) for heads in (1, 2, 4)}
MODELS |= {name: tiny_family(name) for name in ("mistral, window", "opt, projected")}
BATCH = st.lists(trees(vocab=97), min_size=1, max_size=3)


def tokens_to(tree: Tree, node: int) -> list[int]:
    return [tree.tokens[i] for i in path_to(tree, node)]


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@BOTH_SHAPES
@pytest.mark.parametrize("lm", MODELS.values(), ids=MODELS)
@settings(max_examples=25)
@given(data=st.data())
def test_every_node_sees_only_its_own_path(
    lm: PreTrainedModel, static: bool, data: st.DataObject
) -> None:
    """In batches of unequal lengths and shapes, with a cache of just enough space."""
    drawn = data.draw(BATCH)
    prompts = [PROMPT[: data.draw(st.integers(0, 8))] for _ in drawn]
    runner = Runner(
        lm,
        capacity=1 + max(map(len, prompts)),
        max_rows=max(len(tree.tokens) for tree in drawn),
        batch=len(drawn),
        static=static,
    )
    runner.prefill(prompts)
    for tree, prompt, logits in zip(drawn, prompts, logits_of(runner, drawn)):
        node = data.draw(st.integers(0, len(tree.tokens) - 1))
        assert_close(logits[node], by_library(lm, prompt + tokens_to(tree, node)))


@settings(max_examples=60)
@given(data=st.data())
def test_a_committed_path_is_as_if_it_had_been_the_prompt(
    llama: PreTrainedModel, data: st.DataObject
) -> None:
    """In a batch after a sequence is dropped and more text is read."""
    drawn = data.draw(BATCH)
    texts = [PROMPT[: 1 + b] for b in range(len(drawn))]
    runner = Runner(llama, capacity=32, max_rows=16, batch=3)
    runner.prefill(texts)
    logits_of(runner, drawn)
    paths = [
        path_to(tree, data.draw(st.integers(0, tree.probes_from - 1))) for tree in drawn
    ]
    runner.commit(paths)
    for text, tree, path in zip(texts, drawn, paths):
        text += [tree.tokens[node] for node in path]
    if len(texts) > 1:
        b = data.draw(st.integers(0, len(texts) - 1))
        runner.drop(b)
        texts[b] = texts[-1]
        texts.pop()
    further = [PROMPT[: data.draw(st.integers(0, 3))] for _ in texts]
    runner.read(further)
    texts = [text + more for text, more in zip(texts, further)]
    assert runner.lengths == [len(text) for text in texts]
    result = logits_of(runner, [Tree.chain(9, [2])] * len(texts))
    for text, logits in zip(texts, result):
        assert_close(logits[1], by_library(llama, [*text, 9, 2]))


@BOTH_SHAPES
@pytest.mark.parametrize("lm", MODELS.values(), ids=MODELS)
@settings(max_examples=20)
@given(data=st.data())
def test_a_tree_fed_in_parts_is_the_tree_fed_at_once(
    lm: PreTrainedModel, static: bool, data: st.DataObject
) -> None:
    """As for a draft model: only new nodes are rows, and they attend to the nodes that were fed before."""
    drawn = [Tree(t.tokens, t.parents, len(t.tokens)) for t in data.draw(BATCH)]
    n = len(drawn)
    prompts = [PROMPT[: data.draw(st.integers(0, 8))] for _ in drawn]
    runner = Runner(lm, capacity=32, max_rows=32, batch=3, static=static)
    runner.prefill(prompts)

    def check(trees: list[Tree], nodes: list[int], fed: list[int]) -> None:
        output = runner.forward(trees, [Request([0])] * n, GREEDY, fed)
        for b, (prompt, tree, node) in enumerate(zip(prompts, trees, nodes)):
            result = output.next_candidates(b, [node], 5)
            text = prompt + tokens_to(tree, node)
            chances = by_library(lm, text).softmax(-1)
            weights = torch.tensor(result.weights[0])
            assert_close(weights, chances.topk(5).values)
            assert_close(weights, chances[result.ids[0]])

    ends = [len(tree.tokens) for tree in drawn]
    fed = [0] * n
    cuts = [sorted(data.draw(st.integers(1, end)) for _ in range(2)) for end in ends]
    for upto in (*zip(*cuts), ends):
        # A sequence without a new node computes its last row again.
        fed = [min(a, b - 1) for a, b in zip(fed, upto)]
        parts = [Tree(t.tokens[:n], t.parents[:n], n) for t, n in zip(drawn, upto)]
        check(parts, [data.draw(st.integers(a, b - 1)) for a, b in zip(fed, upto)], fed)
        fed = list(upto)
    runner.commit([path_to(tree, end - 1) for tree, end in zip(drawn, ends)])
    for prompt, tree, end in zip(prompts, drawn, ends):
        prompt += tokens_to(tree, end - 1)
    check([Tree.chain(9)] * n, [0] * n, [0] * n)


def test_a_runner_with_graphs_serves_the_next_text_that_fits() -> None:
    lm = tiny_llama()
    runners = Runners(lm, static=True)
    first = runners.take(batch=2, capacity=60, max_rows=9)
    assert runners.take(batch=1, capacity=10, max_rows=1) is not first  # in use
    runners.give(first)
    assert runners.take(batch=1, capacity=40, max_rows=9) is first
    for capacity, change in ((300, None), (40, lm.double)):
        runners.give(first)
        if change:
            change()  # the graphs have the addresses of the weights before
        assert runners.take(batch=1, capacity=capacity, max_rows=9) is not first
