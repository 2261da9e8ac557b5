"""The loop against chosen logits, and losslessness on random models."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import perf_counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.auto import AutoPolicy
from infer.drafters.costs import Costs
from infer.engine.output import ForwardOutput, LazyOutput, Request
from infer.engine.pick import Logits
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.loop import Drafter, Drafters, Limits, Step, decode
from infer.ngrams import Ngrams
from infer.trees.tree import Tree, flatten
from tests.conftest import tiny_llama

A = 90  # the adaptive id of these tests
TEXT = Ngrams(None, 400)
Maker = Callable[[], Drafter]


class ScriptedRunner:
    """A model that counts up from the prompt, and whose probes are right where `right(j)` says so."""

    clock = staticmethod(perf_counter)

    def __init__(self, right: Callable[[int], bool]) -> None:
        self.right, self.lengths, self.forwards = right, [0], 0

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        self.lengths = [len(prompt) for prompt in prompts]

    def forward(self, trees: Sequence[Tree], requests: Sequence[Request], sampling: Sampling) -> ForwardOutput:
        self.forwards += 1
        (tree,) = trees
        logits = torch.zeros(len(tree.tokens), 400)
        for node, token in enumerate(tree.tokens):
            if node >= tree.probes_from:
                under = next(n for n in tree.probed if node in tree.probes_of(n))
                j = node - tree.probes_of(under)[0] + 1
                token = tree.tokens[under] + j if self.right(j) else 197
            logits[node, token + 1] = 1.0
        return LazyOutput(
            Logits(nn.Identity(), logits, logits), flatten(trees, self.lengths), trees, requests, sampling
        )

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths)]

    def drop(self, b: int) -> None:
        self.dropped = self.lengths.pop(b)

    def agreed(self, seconds: float) -> float:
        return seconds


def sdsat(k: int, probes: str | int = "root", ids: Sequence[int] = (A,), **settings: int) -> Maker:
    return partial(AdaptiveDrafter, ids, FixedPolicy(k, probes, **settings))


def lookup(k: int) -> Maker:
    return partial(AdaptiveDrafter, (), FixedPolicy(k), TEXT)


def run(runner, new: Maker, prompt: Sequence[int], n: int, eos: Collection[int] = ()) -> list[Step]:
    return [step for (step,) in decode(runner, [Request(prompt)], Drafters(new), Limits(n, eos))]


def tokens_of(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


RIGHT = pytest.mark.parametrize(
    ("right", "accepted"),
    [(lambda j: True, 3), (lambda j: False, 0), (lambda j: j == 1, 1), (lambda j: j > 1, 0)],
    ids=["always", "never", "first only", "all but the first"],
)


@RIGHT
def test_two_forwards_emit_the_accepted_drafts_and_two_more(
    right: Callable[[int], bool], accepted: int
) -> None:
    """Equations 1-3: y_{n+1} and y_{n+2} for certain, k+2 tokens at most."""
    steps = run(ScriptedRunner(right), sdsat(3), [1, 2], 40)
    assert tokens_of(steps) == list(range(3, 43))
    for first, second in zip(steps[0:-4:2], steps[1:-4:2]):
        assert (len(first.tokens), first.drafted, first.accepted) == (1, 0, 0)
        assert (len(second.tokens), second.drafted, second.accepted) == (1 + accepted, 3, accepted)


@RIGHT
def test_one_forward_emits_the_accepted_drafts_and_one_more(
    right: Callable[[int], bool], accepted: int
) -> None:
    """With probes under every draft the next draft is made while this one is verified."""
    steps = run(ScriptedRunner(right), sdsat(3, "all"), [1, 2], 40)
    assert tokens_of(steps) == list(range(3, 43))
    for step in steps[1:-4]:
        assert (len(step.tokens), step.drafted, step.accepted) == (1 + accepted, 3, accepted)


def test_without_probes_under_the_paths_end_a_forward_makes_new_drafts() -> None:
    """One probed node of four, the likeliest end: it is the wrong one here, so forwards take turns."""
    steps = run(ScriptedRunner(lambda j: j == 1), sdsat(3, 1), [1, 2], 30)
    assert {step.drafted for step in steps[:-4]} == {0, 3}


def test_plain_decoding_is_one_token_per_forward() -> None:
    runner = ScriptedRunner(lambda j: True)
    assert tokens_of(run(runner, Drafter, [1, 2], 10)) == list(range(3, 13))
    assert runner.forwards == 10
    assert runner.dropped == 2 - 1 + 10  # the last emitted token is never fed


@pytest.mark.parametrize("n", range(1, 12))
@pytest.mark.parametrize("eos", [(), (5,), (6,), (7,), (8,), (99,), (8, 6)])
def test_limits_and_eos_within_an_accepted_draft_cut_as_plain_decoding_does(
    n: int, eos: Collection[int]
) -> None:
    plain = run(ScriptedRunner(lambda j: True), Drafter, [1, 2], n, eos)
    for k in (1, 3, 7):
        for probes in ("root", "all", 2):
            drafted = run(ScriptedRunner(lambda j: True), sdsat(k, probes), [1, 2], n, eos)
            assert tokens_of(drafted) == tokens_of(plain)
            assert [step.finished for step in drafted] == [False] * (len(drafted) - 1) + [True]
            assert all(step.accepted <= len(step.tokens) for step in drafted)
    assert len(tokens_of(plain)) <= n and not set(eos) & set(tokens_of(plain)[:-1])


def test_a_prompt_that_ends_with_eos_is_still_continued() -> None:
    assert tokens_of(run(ScriptedRunner(lambda j: True), Drafter, [1, 2], 3, eos=[2])) == [3, 4, 5]


def test_no_row_lies_beyond_the_last_token() -> None:
    """A model's positions end somewhere: prompt and new tokens within them are enough."""

    class Watched(ScriptedRunner):
        def forward(self, trees, requests, sampling):
            output = super().forward(trees, requests, sampling)
            assert output.flat.positions.max() < 2 + 9 - 1
            return output

    for new in (sdsat(7), sdsat(5, "all"), lookup(5)):
        assert len(tokens_of(run(Watched(lambda j: True), new, [1, 2], 9))) == 9


def test_looking_up_the_text_itself() -> None:
    """What followed the longest match of the last six, four, three or two tokens; nothing without a match."""
    text = [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]
    assert lookup(3)().propose(text, 99).tokens == (3, 4, 9, 2)  # behind 1 2 3, not behind 9 2 3
    assert lookup(3)().propose([*text, 7], 99).tokens == (7,)
    assert lookup(3)().propose([*text, 7, 9, 2], 99).tokens == (2, 3, 5, 1)  # not behind 1 2
    assert lookup(3)().propose([*text, 7, 9, 2], 2).tokens == (2, 3)  # no more than may be emitted
    assert lookup(3)().propose([*text, 7, 9, 2], 2).sources == ("", "text")


COSTS = Costs((1, 2, 4, 8, 16, 32), (10.0, 10.0, 10.5, 11.0, 12.0, 14.0))
MAKERS: dict[str, Callable[[int], Maker]] = {
    "lookup": lookup,
    "two-forward": lambda k: sdsat(k),
    "diverse": lambda k: sdsat(k, ids=range(80, 80 + k)),
    "one-forward": lambda k: sdsat(k, "all"),
    "two sites": lambda k: sdsat(k, 2),
    "tree": lambda k: sdsat(k, nodes=12, width=4),
    "one-forward tree": lambda k: sdsat(k, "all", nodes=6, width=3),
    "auto": lambda k: partial(AdaptiveDrafter, (A,), AutoPolicy(COSTS, k)),
}
SAMPLINGS = st.sampled_from(
    [Sampling(), Sampling(1.0), Sampling(0.7, 10, 0.95), Sampling(1.5, 0, 0.9), Sampling(0.2, 5)]
)
PROMPTS = st.lists(st.integers(2, 96), min_size=1, max_size=12)


@settings(max_examples=80)
@given(
    st.lists(PROMPTS, min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(0, 3),
    st.sampled_from([1, 2, 4]),
    SAMPLINGS,
    st.sampled_from(list(MAKERS)),
    st.sampled_from([0, 1, 2**40]),
    st.sampled_from([1, 2, 7, 40]),
)
def test_drafting_changes_no_token(prompts, k, model, kv_heads, sampling, method, seed, n) -> None:
    """Random models in float64, every method, greedy and sampled: each sequence of a batch, with drafts,
    is what plain decoding gives it alone.
    """
    lm = tiny_llama(seed=model, kv_heads=kv_heads).double()
    new = MAKERS[method](k)
    requests = [Request(prompt, seed + b) for b, prompt in enumerate(prompts)]
    runner = Runner(lm, capacity=52, max_rows=new().max_rows, batch=4)
    result: list[list[int]] = [[] for _ in prompts]
    for steps in decode(runner, requests, Drafters(new), Limits(n, [1]), sampling):
        for step in steps:
            result[step.sequence] += step.tokens
    for request, tokens in zip(requests, result):
        alone = decode(runner, [request], Drafters(Drafter), Limits(n, [1]), sampling)
        assert tokens_of([step for (step,) in alone]) == tokens


@settings(max_examples=25)
@given(PROMPTS, st.integers(1, 6), st.sampled_from(list(MAKERS)), st.floats(1.01, 3))
@example([7, 7, 7], 5, "auto", 2.0)
def test_the_librarys_processors_act_as_in_plain_decoding(prompt, k, method, penalty) -> None:
    """And plain decoding, with them and without, is the library's own `generate`; float32."""
    lm = tiny_llama(seed=1)
    runner = Runner(lm, capacity=52, max_rows=100)
    ids = torch.tensor([prompt])
    for processors in (None, LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])):
        request = [Request(prompt, processors=processors)]
        plain, drafted = (
            [
                token
                for (step,) in decode(runner, request, Drafters(new), Limits(30, [1]))
                for token in step.tokens
            ]
            for new in (Drafter, MAKERS[method](k))
        )
        assert drafted == plain
        library = lm.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=30,
            pad_token_id=1,
            **({"repetition_penalty": penalty} if processors else {}),
        )
        assert library[0, len(prompt) :].tolist() == plain


def test_sampled_text_depends_on_the_seed() -> None:
    runner = Runner(tiny_llama(), capacity=60, max_rows=1)
    result = set()
    for seed in (1, 2, 1, 3):
        steps = decode(runner, [Request([5, 6], seed)], Drafters(Drafter), Limits(20), Sampling(1.0))
        result.add(tuple(token for (step,) in steps for token in step.tokens))
    assert len(result) == 3


def test_k_beyond_the_diverse_ids_is_refused() -> None:
    assert AdaptiveDrafter([A], FixedPolicy(13)).max_rows == 14
    with pytest.raises(ValueError, match="must be 1 to 2 adaptive tokens, got 3"):
        AdaptiveDrafter([A, A + 1], FixedPolicy(3))
    with pytest.raises(ValueError, match="at least 1"):
        AdaptiveDrafter([A], FixedPolicy(0))
