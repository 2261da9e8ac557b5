"""The loop against chosen logits, and losslessness on random models."""

from collections.abc import Callable, Collection, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.drafters.adaptive import AdaptiveDrafter
from infer.drafters.plain import PlainDrafter
from infer.loop import Drafter, Step, decode
from infer.runner import Runner
from infer.tree import Tree
from tests.conftest import tiny_llama

A = 90  # the adaptive id of these tests


class ScriptedRunner:
    """A model that counts up from the prompt, and whose probes are right where `right(j)` says so."""

    def __init__(self, right: Callable[[int], bool]) -> None:
        self.right, self.length, self.forwards = right, 0, 0

    def prefill(self, tokens: Sequence[int]) -> None:
        self.length = len(tokens)

    def forward(self, tree: Tree) -> torch.Tensor:
        self.forwards += 1
        logits = torch.zeros(len(tree.tokens), 100)
        for node, token in enumerate(tree.tokens):
            if node >= tree.probes_from:
                j = node - tree.probes_from + 1
                token = tree.tokens[0] + j if self.right(j) else 97
            logits[node, token + 1] = 1.0
        return logits

    def commit(self, path: Sequence[int]) -> None:
        self.length += len(path)


def run(runner, drafter: Drafter, prompt: Sequence[int], n: int, eos: Collection[int] = ()) -> list[Step]:
    return list(decode(runner, drafter, prompt, max_new_tokens=n, eos=eos))


def tokens_of(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize(
    ("right", "accepted"),
    [(lambda j: True, 3), (lambda j: False, 0), (lambda j: j == 1, 1), (lambda j: j > 1, 0)],
    ids=["always", "never", "first only", "all but the first"],
)
def test_two_forwards_emit_the_accepted_drafts_and_two_more(
    right: Callable[[int], bool], accepted: int
) -> None:
    """Equations 1-3: y_{n+1} and y_{n+2} for certain, k+2 tokens at most."""
    steps = run(ScriptedRunner(right), AdaptiveDrafter([A], 3), [1, 2], 30)
    assert tokens_of(steps) == list(range(3, 33))
    for first, second in zip(steps[0:-2:2], steps[1:-2:2]):
        assert (len(first.tokens), first.drafted, first.accepted) == (1, 0, 0)
        assert (len(second.tokens), second.drafted, second.accepted) == (1 + accepted, 3, accepted)


def test_plain_decoding_is_one_token_per_forward() -> None:
    runner = ScriptedRunner(lambda j: True)
    assert tokens_of(run(runner, PlainDrafter(), [1, 2], 10)) == list(range(3, 13))
    assert runner.forwards == 10
    assert runner.length == 2 - 1 + 10  # the last emitted token is never fed


@pytest.mark.parametrize("n", range(1, 12))
@pytest.mark.parametrize("eos", [(), (5,), (6,), (7,), (8,), (99,), (8, 6)])
def test_limits_and_eos_within_an_accepted_draft_cut_as_plain_decoding_does(
    n: int, eos: Collection[int]
) -> None:
    plain = tokens_of(run(ScriptedRunner(lambda j: True), PlainDrafter(), [1, 2], n, eos))
    for k in (1, 3, 7):
        drafted = tokens_of(run(ScriptedRunner(lambda j: True), AdaptiveDrafter([A], k), [1, 2], n, eos))
        assert drafted == plain
    assert len(plain) <= n and not set(eos) & set(plain[:-1])


def test_a_prompt_that_ends_with_eos_is_still_continued() -> None:
    assert tokens_of(run(ScriptedRunner(lambda j: True), PlainDrafter(), [1, 2], 3, eos=[2])) == [3, 4, 5]


PROMPTS = st.lists(st.integers(2, 96), min_size=1, max_size=12)


@settings(max_examples=40)
@given(PROMPTS, st.integers(1, 9), st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_drafting_changes_no_token(prompt: list[int], k: int, seed: int, kv_heads: int) -> None:
    """Float32, random models, identical and diverse tokens: plain, drafted and the library agree."""
    lm = tiny_llama(seed=seed, kv_heads=kv_heads)
    runner = Runner(lm, capacity=80, max_rows=16)
    plain = tokens_of(run(runner, PlainDrafter(), prompt, 40, eos=[1]))
    assert tokens_of(run(runner, AdaptiveDrafter([A], k), prompt, 40, eos=[1])) == plain
    diverse = AdaptiveDrafter(list(range(80, 80 + k)), k)
    assert tokens_of(run(runner, diverse, prompt, 40, eos=[1])) == plain
    lm.set_attn_implementation("sdpa")
    ids = torch.tensor([prompt])
    library = lm.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, pad_token_id=1
    )
    assert library[0, len(prompt) :].tolist() == plain


def test_k_beyond_the_diverse_ids_is_refused() -> None:
    assert AdaptiveDrafter([A], 13).max_rows == 14
    with pytest.raises(ValueError, match="wanted 1 to 2 adaptive tokens, found 3"):
        AdaptiveDrafter([A, A + 1], 3)
    with pytest.raises(ValueError, match="at least 1"):
        AdaptiveDrafter([A], 0)
