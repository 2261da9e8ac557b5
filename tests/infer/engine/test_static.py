"""Fixed shapes, on a CPU without graphs: the same steps as in dynamic shapes."""

from collections.abc import Callable
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
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.engine.static import Inputs, Shape, additive_mask
from infer.loop import Drafter, Drafters, Limits, Step, decode
from infer.models.gated import gate_model
from infer.trees.tree import Tree, flatten, mask
from tests.conftest import tiny_llama
from tests.infer.gated import write_adapter
from tests.infer.library import collect, steps_of
from tests.infer.trees.test_tree import trees

PROMPT = [5, 17, 3, 88, 41]
TWO_FORWARDS = partial(AdaptiveDrafter, [90], FixedPolicy(5))
A_TREE = partial(AdaptiveDrafter, [90], FixedPolicy(3, "all", nodes=12, width=10))
PENALTY = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(9.0)])
SAMPLED = {
    "greedy": GREEDY,
    "top_k": Sampling(0.8, top_k=10, top_p=0.95),
    "top_p": Sampling(1.0, top_p=0.9),
    "few": Sampling(0.7, top_k=3),
}
DRAFTERS = {"plain": Drafter, "two forwards": TWO_FORWARDS, "tree": A_TREE}


def requests(n: int, processors: LogitsProcessorList | None = None) -> list[Request]:
    return [Request(PROMPT[b:], b, processors if b == 0 else None) for b in range(n)]


@settings(max_examples=60)
@given(st.lists(trees(), min_size=1, max_size=3), st.data())
def test_the_mask_made_on_the_device_is_the_trees(
    drawn: list[Tree], data: st.DataObject
) -> None:
    lengths = [data.draw(st.integers(0, 20)) for _ in drawn]
    window = data.draw(st.sampled_from([None, 1, 3, 8]))
    fed = [data.draw(st.integers(0, tree.probes_from - 1)) for tree in drawn]
    probes = data.draw(st.sampled_from([0, 12]))
    flat = flatten(drawn, lengths, fed=fed, drafts=8, probes=probes, width=32)
    B, q, w = flat.attends.shape
    shape = Shape(B, q - probes, probes, w, 64, GREEDY, False, False)
    inputs = Inputs(shape, torch.device("cpu"))
    inputs.fill(flat, lengths, [7] * B)
    result = additive_mask(inputs, 64, window, torch.float32)
    expected = mask(flat, lengths, 64, window=window)
    assert np.array_equal(result.numpy(), np.where(expected, 0, -np.inf))
    assert torch.equal(inputs.ids, torch.from_numpy(flat.ids))
    assert inputs.seeds.tolist() == [7] * B


@pytest.mark.parametrize("processors", [None, PENALTY], ids=["", "processors"])
@pytest.mark.parametrize("sampling", SAMPLED)
@pytest.mark.parametrize("new", DRAFTERS)
@pytest.mark.parametrize("n", [1, 3])
def test_steps_are_the_same_in_fixed_and_dynamic_shapes(
    n: int, new: str, sampling: str, processors: LogitsProcessorList | None
) -> None:
    """Batches shrink, caches outgrow a bucket, rows are padded."""
    fixed, dynamic = (
        steps_of(
            tiny_llama(),
            DRAFTERS[new],
            requests(n, processors),
            SAMPLED[sampling],
            tokens=70,
            static=static,
        )
        for static in (True, False)
    )
    assert fixed == dynamic


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_in_other_types_a_draft_changes_no_token(dtype: torch.dtype) -> None:
    """In bfloat16 for a model without near-ties."""
    lm = tiny_llama(seed=3).to(dtype)
    plain, drafted = (
        collect(steps_of(lm, new, requests(1), tokens=70, static=True), 1)[0]
        for new in (Drafter, TWO_FORWARDS)
    )
    assert plain == drafted


def test_a_policy_that_draws_many_trees_needs_few_graphs() -> None:
    lm = tiny_llama(seed=1)
    policy = MeasuredPolicy(prior_costs("cuda"), 5)
    runner = Runner(lm, capacity=400, max_rows=64, static=True)
    stopwatch = Stopwatch(lm)
    drafters = Drafters(partial(AdaptiveDrafter, [90], policy, stopwatch=stopwatch))
    for seed in range(2):
        request = [Request(PROMPT, seed)]
        list(decode(runner, request, drafters, Limits(380), Sampling(0.7)))
    assert len(runner._forward._graphs) < 40


def test_old_graphs_are_freed(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server meets any number of temperatures."""
    monkeypatch.setattr("infer.engine.static.GRAPHS", 8)
    runner = Runner(llama, capacity=75, max_rows=6, static=True)

    def text(temperature: float) -> list[list[Step]]:
        drafters = Drafters(TWO_FORWARDS)
        sampling = Sampling(temperature)
        return list(decode(runner, requests(1), drafters, Limits(9), sampling))

    first = text(0.5)
    for number in range(9):
        text(1 + number / 10)
    assert len(runner._forward._graphs) == 8
    assert text(0.5) == first


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_an_overflow_does_not_outlive_its_text(
    llama: PreTrainedModel, static: bool
) -> None:
    """NaN stayed in a kept runner, and in the place of a dropped sequence."""
    prompt = [7, 8, 9]
    runner = Runner(llama, capacity=75, max_rows=6, batch=3, static=static)

    def picks(n: int) -> list[int]:
        output = runner.forward([Tree.chain(11)] * n, [Request(PROMPT)] * n, GREEDY)
        return [output.chooser(b, ())(0) for b in range(n)]

    runner.prefill([prompt])
    expected = picks(1)
    runner.prefill([PROMPT * 5, PROMPT * 3, prompt])
    runner._target.cache._kv[:, :, 0] = float("nan")
    runner.drop(0)
    assert picks(2)[0] == expected[0]
    runner._target.cache._kv.fill_(float("nan"))
    runner.prefill([prompt])
    assert picks(1) == expected


@pytest.mark.parametrize("rank", [0, 2, 16], ids=["no adapter", "low rank", "dense"])
def test_the_decoder_compiles_without_graph_breaks(
    rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And once for all shapes of a sequence."""
    traced = []

    def backend(module: nn.Module, inputs: object) -> Callable:
        traced.append(module)
        return module.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    lm = tiny_llama()
    if rank:
        gate_model(lm, write_adapter(tiny_llama(), tmp_path, r=rank))
    compiled, dynamic = (
        steps_of(lm, A_TREE, requests(1), tokens=70, static=on, compile=on)
        for on in (True, False)
    )
    assert compiled == dynamic
    assert len(traced) == (2 if rank else 1)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_batchs_trees_fit_after_the_longest_text(static: bool) -> None:
    """One tree has the most drafts and another one the most probes."""
    trees = [Tree.chain(1), Tree.chain(1, [2] * 5), Tree.chain(1, probes=[90] * 5)]
    prompts = [[1] * 9, [1] * 3, [1] * 3]
    runner = Runner(tiny_llama(), capacity=10, max_rows=6, batch=3, static=static)
    runner.prefill(prompts)
    output = runner.forward(trees, requests(3), GREEDY)
    for b, (tree, prompt) in enumerate(zip(trees, prompts)):
        alone = Runner(tiny_llama(), capacity=10, max_rows=6)
        alone.prefill([prompt])
        expected = alone.forward([tree], requests(1), GREEDY)
        for node in range(tree.probes_from):
            assert output.chooser(b, [1])(node) == expected.chooser(0, [1])(node)
