"""Test fixed shapes on a CPU, without graphs: the same steps as in dynamic shapes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from infer.drafters.planner import FixedPlanner
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafters
from infer.models.gated import gate_model
from infer.trees.tree import Tree
from tests.conftest import tiny_llama
from tests.infer.gated import write_adapter
from tests.infer.library import BOTH_SHAPES, by_tokens, steps_of

PROMPT = [5, 17, 3, 88, 41]
TWO_FORWARDS = partial(by_tokens, [90], FixedPlanner(5))
A_TREE = partial(by_tokens, [90], FixedPlanner(3, "all", nodes=12, width=10))
PENALTY = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(9.0)])
SAMPLED = {
    "greedy": GREEDY,
    "top_k": Sampling(0.8, top_k=10, top_p=0.95),
    "top_p": Sampling(1.0, top_p=0.9),
}
DRAFTERS = {"plain": Drafters, "two forwards": TWO_FORWARDS, "tree": A_TREE}


def requests(n: int, processors: LogitsProcessorList | None = None) -> list[Request]:
    return [Request(PROMPT[b:], b, processors if b == 0 else None) for b in range(n)]


@pytest.mark.parametrize("processors", [None, PENALTY], ids=["", "processors"])
@pytest.mark.parametrize("sampling", SAMPLED)
@pytest.mark.parametrize("new", DRAFTERS)
@pytest.mark.parametrize("n", [1, 3])
def test_steps_are_the_same_in_fixed_and_dynamic_shapes(
    n: int,
    new: str,
    sampling: str,
    processors: LogitsProcessorList | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches shrink, caches outgrow a bucket, rows are padded."""
    monkeypatch.setattr("infer.engine.static.COLUMNS", 32)
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


@BOTH_SHAPES
def test_drawn_and_plain_trees_share_a_padded_batch(
    llama: PreTrainedModel, static: bool
) -> None:
    """Bug: with padding sequences there were fewer seeds than rows: a ValueError."""
    sampling = SAMPLED["top_k"]
    runner = Runner(llama, capacity=75, max_rows=6, batch=4, static=static)
    runner.prefill([PROMPT[b:-1] for b in range(3)])
    drawn = {0: torch.full((llama.config.vocab_size,), 1e-2, dtype=torch.float64)}
    trees = [replace(Tree.chain(41, [7]), drawn=drawn), Tree.chain(41), Tree.chain(41)]
    output = runner.forward(trees, requests(3), sampling)
    picks = [output.chooser(b, ())(0) for b in (1, 2)]
    alone = Runner(llama, capacity=75, max_rows=6)
    for b, pick in zip((1, 2), picks):
        alone.prefill([PROMPT[b:-1]])
        own = alone.forward([Tree.chain(41)], [requests(3)[b]], sampling)
        assert own.chooser(0, ())(0) == pick


def test_a_longer_request_keeps_a_runner_with_room(llama: PreTrainedModel) -> None:
    """Bug: the cache is rounded up, but one more token discarded the runner and its graphs."""
    runner = Runner(llama, capacity=75, max_rows=6, static=True)
    assert runner.fits(batch=1, capacity=76, max_rows=6)
    room = runner._target.cache.capacity
    assert not runner.fits(batch=1, capacity=room + 1, max_rows=6)
    dynamic = Runner(llama, capacity=75, max_rows=6, static=False)
    assert not dynamic.fits(batch=1, capacity=76, max_rows=6)


@BOTH_SHAPES
def test_an_overflow_does_not_outlive_its_text(
    llama: PreTrainedModel, static: bool
) -> None:
    """Regression: NaN stayed in a reused runner, and in the place of a dropped sequence."""
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


def test_the_decoder_compiles_without_graph_breaks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also for a gated model, and with and without probes compiled once for all shapes."""
    traced = []

    def backend(module: nn.Module, inputs: object) -> Callable:
        traced.append(module)
        return module.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    lm = tiny_llama()
    gate_model(lm, write_adapter(tiny_llama(), tmp_path, r=16))
    compiled, dynamic = (
        steps_of(lm, A_TREE, requests(1), tokens=20, static=on, compile=on)
        for on in (True, False)
    )
    assert compiled == dynamic and len(traced) == 2
