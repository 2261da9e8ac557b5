"""Fixed shapes on a CPU, where they run without a graph: the same numbers by the other way."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.policy import MeasuredPolicy, prior_costs
from infer.drafters.stopwatch import Stopwatch
from infer.engine.attention import biased
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.engine.static import SAMPLINGS, Inputs, additive_mask
from infer.loop import Drafter, Drafters, Limits, Step, decode
from infer.models.gated import gate_model
from infer.trees.tree import Tree, flatten, key_positions, mask
from tests.conftest import tiny_llama
from tests.infer.gated import write_adapter
from tests.infer.library import collect
from tests.infer.trees.test_tree import trees

PROMPT = [5, 17, 3, 88, 41]
TWO_FORWARDS = partial(AdaptiveDrafter, [90], FixedPolicy(5))
A_TREE = partial(AdaptiveDrafter, [90], FixedPolicy(3, "all", nodes=12, width=10))
Maker = Callable[[], Drafter]
PENALTY = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(9.0)])


def steps(
    lm: PreTrainedModel,
    new: Maker,
    requests: Sequence[Request],
    sampling: Sampling,
    **way: bool,
) -> list[list[Step]]:
    runner = Runner(
        lm, capacity=75, max_rows=new().max_rows, batch=len(requests), **way
    )
    return list(decode(runner, requests, Drafters(new), Limits(70, eos=[1]), sampling))


def requests(n: int, processors: LogitsProcessorList | None = None) -> list[Request]:
    return [Request(PROMPT[b:], b, processors if b == 0 else None) for b in range(n)]


def test_a_policy_that_draws_many_trees_needs_few_graphs() -> None:
    """Every fifth forward was of a new shape, and would have been captured in the middle of a text."""
    lm = tiny_llama(seed=1)
    policy = MeasuredPolicy(prior_costs("cuda"), 5)
    runner = Runner(lm, capacity=400, max_rows=64, static=True)
    stopwatch = Stopwatch(lm)
    drafters = Drafters(partial(AdaptiveDrafter, [90], policy, stopwatch=stopwatch))
    for seed in range(2):
        list(
            decode(
                runner, [Request(PROMPT, seed)], drafters, Limits(380), Sampling(0.7)
            )
        )
    assert len(runner._forward._graphs) < 40


@settings(max_examples=60)
@given(st.lists(trees(), min_size=1, max_size=3), st.data())
def test_the_mask_made_on_the_device_is_the_layouts(
    drawn: list[Tree], data: st.DataObject
) -> None:
    lengths = [data.draw(st.integers(0, 20)) for _ in drawn]
    window = data.draw(st.sampled_from([None, 1, 3, 8]))
    fed = [data.draw(st.integers(0, tree.probes_from - 1)) for tree in drawn]
    probes = data.draw(st.sampled_from([0, 12]))
    flat = flatten(drawn, lengths, fed=fed, drafts=8, probes=probes, width=32)
    B, q, w = flat.seen.shape
    given_ = Inputs(B, q, w, torch.device("cpu"))
    given_.fill(flat, lengths, [7] * B)
    built = additive_mask(given_, 64, window, torch.float32)
    expected = mask(flat, lengths, 64, window=window)
    assert np.array_equal(built.numpy() == 0, expected)
    assert np.array_equal(built.numpy() == -np.inf, ~expected)
    slopes = torch.tensor([0.25, 0.0625])
    at = torch.from_numpy(key_positions(flat, lengths, 64))
    built = additive_mask(given_, 64, window, torch.float32, slopes)
    assert torch.equal(
        built, biased(torch.from_numpy(expected), at, slopes, torch.float32)
    )
    assert (
        torch.equal(given_.ids, torch.from_numpy(flat.ids))
        and given_.seeds.tolist() == [7] * B
    )


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(0.8, top_k=10, top_p=0.95),
        Sampling(1.0, top_p=0.9),
        Sampling(0.7, top_k=3),
    ],
    ids=["greedy", "top_k", "top_p", "few"],
)
@pytest.mark.parametrize(
    "new", [Drafter, TWO_FORWARDS, A_TREE], ids=["plain", "two forwards", "tree"]
)
@pytest.mark.parametrize("n", [1, 3])
def test_step_by_step_both_ways_do_the_same(
    n: int, new: Callable[[], Drafter], sampling: Sampling
) -> None:
    """Batches that shrink, caches that outgrow a bucket, rows that fill up."""
    lm = tiny_llama()
    result = steps(lm, new, requests(n), sampling, static=True)
    assert result == steps(lm, new, requests(n), sampling)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_in_other_types_a_draft_changes_no_token(dtype: torch.dtype) -> None:
    """In bfloat16 on logits far apart: near-ties are another matter."""
    lm = tiny_llama(seed=3).to(dtype)
    plain, drafted = (
        steps(lm, new, requests(1), Sampling(), static=True)
        for new in (Drafter, TWO_FORWARDS)
    )
    assert collect(plain, 1)[0] == collect(drafted, 1)[0]


def test_the_graphs_of_every_temperature_are_not_kept_for_good(
    llama: PreTrainedModel,
) -> None:
    """The runner that is kept between texts got more graphs with each temperature that it had not met."""
    runner = Runner(llama, capacity=75, max_rows=6, static=True)
    graphs = runner._forward._graphs  # type: ignore[attr-defined]

    def text(temperature: float) -> list[list[Step]]:
        return list(
            decode(
                runner,
                requests(1),
                Drafters(TWO_FORWARDS),
                Limits(9),
                Sampling(temperature),
            )
        )

    first = text(0.5)
    for number in range(SAMPLINGS + 3):
        text(1 + number / 10)
    assert len(graphs) == SAMPLINGS and Sampling(0.5) not in graphs
    assert text(0.5) == first


def test_an_overflow_does_not_outlive_its_text(llama: PreTrainedModel) -> None:
    """Rows of NaN stayed behind a text, in the runner that is kept and where a batch had dropped a sequence."""
    second = [[7, 8, 9]]
    for static in (False, True):
        runner = Runner(llama, capacity=75, max_rows=6, batch=3, static=static)

        def picked(n: int, runner: Runner = runner) -> list[int]:
            output = runner.forward(
                [Tree.chain(11)] * n, [Request(PROMPT)] * n, Sampling()
            )
            return [output.chooser(b, ())(0) for b in range(n)]

        runner.prefill(second)
        right = picked(1)
        runner.prefill([PROMPT * 5, PROMPT * 3, second[0]])
        runner._target.cache._kv[:, :, 0] = float("nan")
        runner.drop(0)
        assert picked(2)[0] == right[0]
        runner._target.cache._kv.fill_(float("nan"))
        runner.prefill(second)
        assert picked(1) == right


def test_processors_read_the_same_logits() -> None:
    lm = tiny_llama()
    for sampling in (Sampling(0.8, top_k=10), Sampling()):
        result = steps(lm, A_TREE, requests(2, PENALTY), sampling, static=True)
        assert result == steps(lm, A_TREE, requests(2, PENALTY), sampling)
    assert result != steps(lm, A_TREE, requests(2), Sampling())


@pytest.mark.parametrize("rank", [0, 2, 16], ids=["no adapter", "low rank", "dense"])
def test_the_decoder_compiles_whole(
    rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a graph break, once for all shapes of a sequence."""
    traced = []

    def backend(module: nn.Module, inputs: object) -> Callable:
        traced.append(module)
        return module.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    lm = tiny_llama()
    if rank:
        gate_model(lm, write_adapter(tiny_llama(), tmp_path, r=rank))
    result = steps(lm, A_TREE, requests(1), Sampling(), static=True, compile=True)
    assert result == steps(lm, A_TREE, requests(1), Sampling())
    assert len(traced) == (2 if rank else 1)


def test_a_batchs_trees_fit_behind_the_longest_text() -> None:
    """One tree had the most drafts and another the most probes: together they had more rows than `max_rows`."""
    trees = [Tree.chain(1), Tree.chain(1, [2] * 5), Tree.chain(1, probes=[90] * 5)]
    picks = []
    for static in (False, True):
        runner = Runner(tiny_llama(), capacity=10, max_rows=6, batch=3, static=static)
        runner.prefill([[1] * 9, [1] * 3, [1] * 3])
        output = runner.forward(trees, requests(3), Sampling())
        picks.append(
            [
                output.chooser(b, [1])(node)
                for b in range(3)
                for node in range(trees[b].probes_from)
            ]
        )
    assert picks[0] == picks[1]
