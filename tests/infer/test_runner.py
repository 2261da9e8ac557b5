import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infer.runner import Runner
from infer.tree import Tree
from tests.conftest import tiny_llama
from tests.infer.test_tree import path_to, trees

PROMPT = [5, 17, 3, 88, 41]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@given(data=st.data())
def test_every_node_sees_its_own_path_and_nothing_else(kv_heads: int, data: st.DataObject) -> None:
    """Node by node, a tree's logits equal those of its path as an ordinary sequence."""
    lm = tiny_llama(kv_heads=kv_heads)
    tree = data.draw(trees(vocab=97))
    runner = Runner(lm, capacity=32, max_rows=16)
    runner.prefill(PROMPT)
    logits = runner.forward(tree)
    for node in range(len(tree.tokens)):
        sequence = PROMPT + [tree.tokens[i] for i in path_to(tree, node)]
        alone = Runner(lm, capacity=32, max_rows=16)
        alone.prefill(sequence[:-1])
        expected = alone.forward(Tree.chain(sequence[-1]))[0]
        torch.testing.assert_close(logits[node], expected, rtol=1e-4, atol=1e-4)


@given(data=st.data())
def test_a_committed_path_is_as_if_it_had_been_the_prompt(llama, data: st.DataObject) -> None:
    tree = data.draw(trees(vocab=97))
    node = data.draw(st.integers(0, len(tree.tokens) - 1))
    path = path_to(tree, node)
    runner = Runner(llama, capacity=32, max_rows=16)
    runner.prefill(PROMPT)
    runner.forward(tree)
    runner.commit(path)
    alone = Runner(llama, capacity=32, max_rows=16)
    alone.prefill(PROMPT + [tree.tokens[i] for i in path])
    after = Tree.chain(9, [2])
    assert runner.length == alone.length
    torch.testing.assert_close(runner.forward(after), alone.forward(after), rtol=1e-4, atol=1e-4)


def test_the_library_gives_the_same_logits(llama) -> None:
    runner = Runner(llama, capacity=32, max_rows=16)
    runner.prefill(PROMPT[:-1])
    ours = runner.forward(Tree.chain(PROMPT[-1]))[0]
    llama.set_attn_implementation("sdpa")
    theirs = llama(torch.tensor([PROMPT])).logits[0, -1]
    llama.set_attn_implementation("tree")
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_top_logits_are_exact_in_bfloat16() -> None:
    lm = tiny_llama().to(torch.bfloat16)
    runner = Runner(lm, capacity=32, max_rows=4)
    hidden = torch.randn(3, 32).to(torch.bfloat16)
    logits = runner._logits(hidden)
    exact = hidden.float() @ lm.lm_head.weight.float().T
    top = logits.topk(4).indices
    torch.testing.assert_close(logits.gather(1, top), exact.gather(1, top), rtol=1e-6, atol=1e-5)
    assert torch.equal(logits.argmax(-1), exact.argmax(-1))


def test_what_does_not_fit_is_refused(llama) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Runner(llama, capacity=4, max_rows=1).prefill(list(range(9)))
    other = tiny_llama()
    other.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="attn_implementation='tree'"):
        Runner(other, capacity=4, max_rows=1)
