"""ALiBi's bias follows the tree, and the library's model is left as it was for the library."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BloomForCausalLM

from infer.engine.attention import biased, leave_to_masks
from infer.engine.forward import context_length
from infer.engine.runner import Runner
from infer.trees.tree import Tree, flatten, key_positions, mask
from tests.infer.engine.test_families import PROMPTS, tiny
from tests.infer.engine.test_runner import by_library, logits_of
from tests.infer.trees.test_tree import path_to, trees


def tiny_bloom(heads: int = 4) -> BloomForCausalLM:
    return tiny("bloom", n_layer=2, n_head=heads, hidden_size=8 * heads)


def test_two_rivals_and_a_child_behind_two_tokens() -> None:
    """A root, its rivals, the child of the first: columns 2 to 5 hold positions 2, 3, 3, 4."""
    tree = Tree((5, 1, 2, 3), (-1, 0, 0, 1), 4)
    flat, lengths, no = flatten([tree], [2]), [2], -torch.inf
    at = torch.from_numpy(key_positions(flat, lengths, 6))
    assert at.tolist() == [[0, 1, 2, 3, 3, 4]]
    attends = torch.from_numpy(mask(flat, lengths, 6))
    (by_head,) = biased(attends, at, torch.tensor([1.0, 0.5]), torch.float32)
    assert by_head[0].tolist() == [
        [0, 1, 2, no, no, no],
        [0, 1, 2, 3, no, no],
        [0, 1, 2, no, 3, no],
        [0, 1, 2, 3, no, 4],
    ]
    assert torch.equal(by_head[1], by_head[0] / 2)


@pytest.mark.parametrize("heads", [1, 2, 8, 16])
def test_slopes_are_those_of_the_paper(heads: int) -> None:
    """2^(-8/n), and its powers."""
    slopes = leave_to_masks(tiny_bloom(heads).get_decoder())
    expected = torch.tensor([2 ** (-8 / heads * (head + 1)) for head in range(heads)])
    torch.testing.assert_close(slopes, expected)


@settings(max_examples=30)
@given(data=st.data())
def test_every_node_has_its_paths_logits(data: st.DataObject) -> None:
    """In batches of unequal lengths and shapes, as for models without ALiBi."""
    lm = tiny_bloom()
    drawn = data.draw(st.lists(trees(vocab=97), min_size=1, max_size=3))
    prompts = [PROMPTS[0][: data.draw(st.integers(0, 12))] for _ in drawn]
    runner = Runner(lm, capacity=32, max_rows=16, batch=3)
    runner.prefill(prompts)
    for tree, prompt, logits in zip(drawn, prompts, logits_of(runner, drawn)):
        node = data.draw(st.integers(0, len(tree.tokens) - 1))
        expected = by_library(lm, prompt + [tree.tokens[i] for i in path_to(tree, node)])
        torch.testing.assert_close(logits[node], expected, rtol=1e-4, atol=1e-4)


def test_the_librarys_own_forward_stays_the_same() -> None:
    """Under the name of tree attention, and after a runner: without a mask, with one of padding, and
    token by token.
    """
    lm = tiny_bloom()
    Runner(lm, capacity=8, max_rows=1)
    other = BloomForCausalLM._from_config(copy.deepcopy(lm.config), attn_implementation="eager").eval()
    other.load_state_dict(lm.state_dict())
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    padded = torch.ones_like(ids)
    padded[0, :5] = 0
    for attention_mask in (None, padded):
        result, expected = (item(ids, attention_mask=attention_mask).logits for item in (lm, other))
        assert torch.equal(result, expected)
    result, expected = (item.generate(ids, attention_mask=padded, max_new_tokens=9) for item in (lm, other))
    assert torch.equal(result, expected)


def test_the_context_is_what_the_model_was_trained_on() -> None:
    """ALiBi has no table of positions to read it off."""
    config = tiny_bloom().config
    assert context_length(config) == 2048
    config.seq_length = 512
    assert context_length(config) == 512
    assert context_length(tiny("opt").config) == 128
