"""Test the loop with chosen logits."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import pytest
import torch
from torch import nn

from infer.drafters.planner import FixedPlanner
from infer.engine.output import ForwardOutput, LazyOutput, Request
from infer.engine.pick import Logits
from infer.engine.sampling import Sampling
from infer.loop import Drafters, Limits, Step, decode
from infer.ngrams import Ngrams
from infer.trees.tree import Tree, flatten
from tests.infer.library import by_tokens, collect

A = 90  # the adaptive id of these tests
Maker = Callable[[], Drafters]


class ScriptedRunner:
    """A runner of a model that counts up; the first `right` of its probes are right."""

    def __init__(self, right: int) -> None:
        self.right = right
        self.lengths = [0]
        self.last = 0

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        self.lengths = [len(prompt) for prompt in prompts]

    def forward(
        self, trees: Sequence[Tree], requests: Sequence[Request], sampling: Sampling
    ) -> ForwardOutput:
        (tree,) = trees
        logits = torch.zeros(len(tree.tokens), 400)
        for node, token in enumerate(tree.tokens):
            if node >= tree.probes_from:
                under = next(n for n in tree.probed if node in tree.probes_of(n))
                j = node - tree.probes_of(under)[0] + 1
                token = tree.tokens[under] + j if j <= self.right else 197
            logits[node, token + 1] = 1.0
        flat = flatten(trees, self.lengths)
        self.last = max(self.last, int(flat.positions.max()))
        shares = Logits(nn.Identity(), logits, logits)
        return LazyOutput(shares, flat, trees, requests, sampling)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths)]

    def drop(self, b: int) -> None:
        self.lengths.pop(b)


def sdsat(k: int, probes: str | int = "root") -> Maker:
    return partial(by_tokens, (A,), FixedPlanner(k, probes))


def lookup(k: int) -> Maker:
    return partial(by_tokens, (), FixedPlanner(nodes=k), Ngrams(None, 400))


def run(
    runner: ScriptedRunner, new: Maker, n: int, eos: Collection[int] = ()
) -> tuple[list[int], list[Step]]:
    decoded = decode(runner, [Request([1, 2])], new(), Limits(n, eos))
    (tokens,), steps = collect(decoded, 1)
    return tokens, steps


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_forward_emits_the_accepted_drafts_and_one_more(accepted: int) -> None:
    """Two forwards in turn (eq. 1-3): k+2 tokens at most, or every forward verifies."""
    verifies = (1 + accepted, 3, accepted)
    for probes, other in (("root", (1, 0, 0)), ("all", verifies)):
        tokens, steps = run(ScriptedRunner(accepted), sdsat(3, probes), 40)
        assert tokens == list(range(3, 43))
        figures = [(len(step.tokens), step.drafted, step.accepted) for step in steps]
        assert figures[0] == (1, 0, 0)
        assert figures[1:-4:2] == [verifies] * len(figures[1:-4:2])
        assert figures[2:-4:2] == [other] * len(figures[2:-4:2])


@pytest.mark.parametrize("n", [1, 2, 5, 11])
@pytest.mark.parametrize("eos", [(), (5,), (6,), (7,), (99,), (8, 6)])
def test_limits_and_eos_cut_an_accepted_draft(n: int, eos: Collection[int]) -> None:
    """No row is after the last token, because a model has a maximum position."""
    text = range(3, 3 + n)
    stop = next((i for i, token in enumerate(text, 1) if token in eos), n)
    for new in (Drafters, sdsat(1), sdsat(7), sdsat(5, "all"), sdsat(3, 2), lookup(5)):
        runner = ScriptedRunner(right=9)
        tokens, steps = run(runner, new, n, eos)
        assert tokens == list(text[:stop])
        assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]
        assert all(step.accepted <= len(step.tokens) for step in steps)
        assert runner.last < 2 + n - 1 or n == 1
