"""The loop against chosen logits, and losslessness on random models."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import pytest
import torch
from torch import nn

from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.engine.output import ForwardOutput, LazyOutput, Request
from infer.engine.pick import Logits
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.loop import Drafter, Drafters, Limits, Step, decode
from infer.ngrams import Ngrams
from infer.trees.tree import Tree, flatten
from tests.conftest import tiny_llama
from tests.infer.library import collect

A = 90  # the adaptive id of these tests
TEXT = Ngrams(None, 400)
Maker = Callable[[], Drafter]


class ScriptedRunner:
    """A model that counts up from the prompt, and whose probes are right where `right(j)` says so."""

    def __init__(self, right: Callable[[int], bool]) -> None:
        self.right, self.lengths, self.forwards = right, [0], 0

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        self.lengths = [len(prompt) for prompt in prompts]

    def forward(
        self, trees: Sequence[Tree], requests: Sequence[Request], sampling: Sampling
    ) -> ForwardOutput:
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
            Logits(nn.Identity(), logits, logits),
            flatten(trees, self.lengths),
            trees,
            requests,
            sampling,
        )

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths)]

    def drop(self, b: int) -> None:
        self.dropped = self.lengths.pop(b)


def sdsat(
    k: int, probes: str | int = "root", ids: Sequence[int] = (A,), **settings: int
) -> Maker:
    return partial(AdaptiveDrafter, ids, FixedPolicy(k, probes, **settings))


def lookup(k: int) -> Maker:
    return partial(AdaptiveDrafter, (), FixedPolicy(k), TEXT)


def run(
    runner, new: Maker, prompt: Sequence[int], n: int, eos: Collection[int] = ()
) -> list[Step]:
    return collect(decode(runner, [Request(prompt)], Drafters(new), Limits(n, eos)), 1)[
        1
    ]


def tokens_of(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize(
    ("right", "accepted"),
    [
        (lambda j: True, 3),
        (lambda j: False, 0),
        (lambda j: j == 1, 1),
        (lambda j: j > 1, 0),
    ],
    ids=["always", "never", "first only", "all but the first"],
)
def test_a_forward_emits_the_accepted_drafts_and_one_more(
    right: Callable[[int], bool], accepted: int
) -> None:
    """Two forwards in turn (eq. 1-3): y_{n+1} and y_{n+2} for certain, k+2 tokens at most."""
    verifies = (1 + accepted, 3, accepted)
    for probes, turns in (
        ("root", [(1, 0, 0), verifies]),
        ("all", [verifies, verifies]),
    ):
        steps = run(ScriptedRunner(right), sdsat(3, probes), [1, 2], 40)
        assert tokens_of(steps) == list(range(3, 43))
        for n, step in enumerate(steps[:-4]):
            assert (len(step.tokens), step.drafted, step.accepted) == (
                turns[n % 2] if n else (1, 0, 0)
            )


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
            drafted = run(
                ScriptedRunner(lambda j: True), sdsat(k, probes), [1, 2], n, eos
            )
            assert tokens_of(drafted) == tokens_of(plain)
            assert [step.finished for step in drafted] == [False] * (
                len(drafted) - 1
            ) + [True]
            assert all(step.accepted <= len(step.tokens) for step in drafted)
    assert len(tokens_of(plain)) <= n and not set(eos) & set(tokens_of(plain)[:-1])
    assert (
        tokens_of(run(ScriptedRunner(lambda j: True), Drafter, [1, 2], n, [2]))[0] == 3
    )  # the prompt's last


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
    assert lookup(3)().propose(text, 99).tokens == (
        3,
        4,
        9,
        2,
    )  # behind 1 2 3, not behind 9 2 3
    assert lookup(3)().propose([*text, 7], 99).tokens == (7,)
    assert lookup(3)().propose([*text, 7, 9, 2], 99).tokens == (
        2,
        3,
        5,
        1,
    )  # not behind 1 2
    assert lookup(3)().propose([*text, 7, 9, 2], 2).tokens == (
        2,
        3,
    )  # no more than may be emitted
    assert lookup(3)().propose([*text, 7, 9, 2], 2).sources == ("", "text")


def test_sampled_text_depends_on_the_seed() -> None:
    runner = Runner(tiny_llama(), capacity=60, max_rows=1)
    result = set()
    for seed in (1, 2, 1, 3):
        decoded = decode(
            runner,
            [Request([5, 6], seed)],
            Drafters(Drafter),
            Limits(20),
            Sampling(1.0),
        )
        result.add(tuple(tokens_of(collect(decoded, 1)[1])))
    assert len(result) == 3
