import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from infer.engine.output import Request
from infer.engine.runner import Runner, Runners
from infer.engine.sampling import Sampling
from infer.trees.tree import Tree
from tests.conftest import tiny_llama
from tests.infer.engine.test_families import FAMILIES, tiny
from tests.infer.library import by_library, logits_of
from tests.infer.trees.test_tree import path_to, trees

PROMPT = [5, 17, 3, 88, 41, 22, 60, 9]
MODELS = {f"{heads} key-value heads": tiny_llama(kv_heads=heads) for heads in (1, 2, 4)}
MODELS |= {
    name: tiny(FAMILIES[name][0], **FAMILIES[name][1])
    for name in ("mistral, window", "opt", "bloom")
}


@pytest.mark.parametrize("lm", MODELS.values(), ids=MODELS)
@settings(max_examples=40)
@given(data=st.data())
def test_every_node_sees_its_own_path_and_nothing_else(
    lm: PreTrainedModel, data: st.DataObject
) -> None:
    """Node by node, in batches of unequal lengths and shapes: the library's logits of its path."""
    drawn = data.draw(st.lists(trees(vocab=97), min_size=1, max_size=3))
    prompts = [PROMPT[: data.draw(st.integers(0, 8))] for _ in drawn]
    runner = Runner(lm, capacity=32, max_rows=16, batch=3)
    runner.prefill(prompts)
    for tree, prompt, logits in zip(drawn, prompts, logits_of(runner, drawn)):
        node = data.draw(st.integers(0, len(tree.tokens) - 1))
        expected = by_library(
            lm, prompt + [tree.tokens[i] for i in path_to(tree, node)]
        )
        torch.testing.assert_close(logits[node], expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=60)
@given(data=st.data())
def test_committed_paths_are_as_if_they_had_been_the_prompt(
    llama, data: st.DataObject
) -> None:
    """Of several sequences; and one is dropped, whose place the last takes."""
    drawn = data.draw(st.lists(trees(vocab=97), min_size=1, max_size=3))
    texts = [PROMPT[: 1 + b] for b in range(len(drawn))]
    runner = Runner(llama, capacity=32, max_rows=16, batch=3)
    runner.prefill(texts)
    logits_of(runner, drawn)
    paths = [
        path_to(tree, data.draw(st.integers(0, tree.probes_from - 1))) for tree in drawn
    ]
    runner.commit(paths)
    texts = [
        text + [tree.tokens[i] for i in path]
        for text, tree, path in zip(texts, drawn, paths)
    ]
    if len(texts) > 1:
        b = data.draw(st.integers(0, len(texts) - 1))
        runner.drop(b)
        texts[b] = texts[-1]
        texts.pop()
    assert runner.lengths == [len(text) for text in texts]
    for text, logits in zip(
        texts, logits_of(runner, [Tree.chain(9, [2])] * len(texts))
    ):
        torch.testing.assert_close(
            logits[1], by_library(llama, [*text, 9, 2]), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("static", [False, True], ids=["as they come", "fixed shapes"])
@pytest.mark.parametrize("lm", MODELS.values(), ids=MODELS)
@settings(max_examples=20)
@given(data=st.data())
def test_a_tree_fed_in_parts_is_the_tree_fed_at_once(
    lm: PreTrainedModel, static: bool, data: st.DataObject
) -> None:
    """As a draft model's: only new nodes are rows, and they see those fed before."""
    drawn = data.draw(st.lists(trees(vocab=97), min_size=1, max_size=3))
    drawn = [Tree(tree.tokens, tree.parents, len(tree.tokens)) for tree in drawn]
    prompts = [PROMPT[: data.draw(st.integers(0, 8))] for _ in drawn]
    runner = Runner(lm, capacity=32, max_rows=32, batch=3, static=static)
    runner.prefill(prompts)
    requests = [Request([0], b) for b in range(len(drawn))]
    fed, ends = [0] * len(drawn), [len(tree.tokens) for tree in drawn]
    while fed != ends:
        upto = [data.draw(st.integers(min(a + 1, b), b)) for a, b in zip(fed, ends)]
        # A sequence that has no new node gives one more row of its last.
        fed = [min(a, b - 1) for a, b in zip(fed, upto)]
        parts = [Tree(t.tokens[:n], t.parents[:n], n) for t, n in zip(drawn, upto)]
        output = runner.forward(parts, requests, Sampling(), fed)
        for b, (prompt, tree) in enumerate(zip(prompts, parts)):
            nodes = range(fed[b], upto[b])
            result = output.next_candidates(b, nodes, 5)
            for node, ids, chances in zip(nodes, result.ids, result.weights):
                logits = by_library(
                    lm, prompt + [tree.tokens[i] for i in path_to(tree, node)]
                )
                expected = logits.softmax(-1).topk(5)
                torch.testing.assert_close(
                    torch.tensor(chances), expected.values, rtol=1e-4, atol=1e-4
                )
                assert ids == expected.indices.tolist()
        fed = upto
    paths = [
        path_to(tree, data.draw(st.integers(0, len(tree.tokens) - 1))) for tree in drawn
    ]
    runner.commit(paths)
    output = runner.forward(
        [Tree.chain(9)] * len(drawn), requests, Sampling(), [0] * len(drawn)
    )
    for b, (prompt, tree, path) in enumerate(zip(prompts, drawn, paths)):
        chance = (
            by_library(lm, [*prompt, *(tree.tokens[i] for i in path), 9])
            .softmax(-1)
            .max()
        )
        assert output.next_candidates(b, [0], 1).weights[0][0] == pytest.approx(
            float(chance), rel=1e-4, abs=1e-4
        )


def test_a_single_row_runs_twice_in_a_narrow_type_on_a_cpu() -> None:
    """A single row's kernels are slow there, and plain decoding is the baseline of every speed-up."""
    lm = tiny_llama().to(torch.bfloat16)
    runner = Runner(lm, capacity=16, max_rows=1)
    runner.prefill([PROMPT])
    output = runner.forward([Tree.chain(7)], [Request([0])], Sampling())
    assert len(output.logits) == 2 and output.flat.seen[0].tolist() == [
        [True, False],
        [False, True],
    ]
    runner.commit([[0]])
    assert runner.lengths == [9]


def test_the_cache_is_allocated_once_and_holds_prompt_and_new_tokens(llama) -> None:
    runner = Runner(llama, capacity=20, max_rows=6, batch=2)
    kv = runner._target.cache._kv
    assert kv.shape == (2, 2, 2, 2, 32, 8)
    for prompts in ([PROMPT, PROMPT[:2]], [PROMPT]):
        runner.prefill(prompts)
        logits_of(runner, [Tree.chain(1, [2, 3])] * len(prompts))
        runner.commit([[0, 1, 2]] * len(prompts))
        assert runner._target.cache._kv is kv
        for layer in runner._target.cache.layers:
            assert (
                layer.keys.untyped_storage().data_ptr()
                == kv.untyped_storage().data_ptr()
            )


def test_what_does_not_fit_is_refused(llama) -> None:
    with pytest.raises(ValueError, match="do not fit a cache of 1 x 4"):
        Runner(llama, capacity=4, max_rows=1).prefill([list(range(9))])
    with pytest.raises(ValueError, match="2 prompts"):
        Runner(llama, capacity=4, max_rows=1).prefill([[1], [2]])


def test_a_runner_with_graphs_is_kept_for_the_next_text_that_fits() -> None:
    """Every call captured its graphs anew."""
    runners = Runners(tiny_llama(), static=True)
    first = runners.take(batch=2, capacity=60, max_rows=9)
    other = runners.take(batch=1, capacity=10, max_rows=1)  # the first is in use
    assert other is not first
    runners.give(first)
    assert runners.take(batch=1, capacity=40, max_rows=9) is first
    runners.give(first)
    assert runners.take(batch=1, capacity=61, max_rows=9) is not first
    without = Runners(tiny_llama())
    without.give(first := without.take(batch=1, capacity=60, max_rows=9))
    assert without.take(batch=1, capacity=60, max_rows=9) is not first


def test_a_runner_of_other_weights_does_not_fit() -> None:
    """The graphs of `infer.generate` had the addresses of the weights before, and its cache their type."""
    lm = tiny_llama()
    runners = Runners(lm, static=True)
    runners.give(first := runners.take(batch=1, capacity=40, max_rows=9))
    lm.double()
    assert runners.take(batch=1, capacity=40, max_rows=9) is not first
