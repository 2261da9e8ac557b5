"""Test that an adapter acts on probes only."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from infer.drafters.planner import FixedPlanner
from infer.engine.attention import ProbeGate
from infer.engine.gate import GatedEmbedding, GatedLinear
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.loop import Drafters
from infer.models.gated import gate_model
from infer.trees.tree import Tree
from tests.infer.engine.test_families import tiny, tiny_family
from tests.infer.gated import write_adapter
from tests.infer.library import by_tokens, collect, logits_of, steps_of

PROMPTS = [[20, 30, 40, 51], [61, 62], [9] * 11]


@pytest.mark.parametrize("rank", [2, 24])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("sequences", "first", "rows"), [(1, 1, 2), (1, 0, 3), (3, 2, 7)]
)
def test_a_layer_is_the_base_models_before_the_gate_and_adapted_after_it(
    rank: int, bias: bool, sequences: int, first: int, rows: int
) -> None:
    torch.manual_seed(0)
    base = nn.Linear(32, 40, bias=bias)
    gate = ProbeGate()
    a = torch.randn(rank, 32)
    b = torch.randn(40, rank)
    x = torch.randn(sequences, rows, 32)
    layer = GatedLinear(base, a, b, 0.5, gate)
    expected = base(x)
    assert torch.equal(layer(x), expected)
    with gate.open(first, rows):
        y = layer(x)
        assert torch.equal(layer(x.flatten(0, 1)), y.flatten(0, 1))
    assert torch.equal(layer(x), expected)
    expected[:, first:] += 0.5 * (x @ a.T @ b.T)[:, first:]
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_an_embeddings_own_rows_are_for_probes_only() -> None:
    base = nn.Embedding(10, 4)
    gate = ProbeGate()
    rows = torch.randn(2, 4)
    layer = GatedEmbedding(base, torch.tensor([7, 3]), rows, gate)
    ids = torch.tensor([[7, 3, 5]])
    assert torch.equal(layer(ids), base(ids))
    with gate.open(1, 3):
        expected = torch.stack([base.weight[7], rows[1], base.weight[5]])
        assert torch.equal(layer(ids)[0], expected)


@pytest.mark.parametrize("family", ["llama", "qwen2_moe, windows", "opt, projected"])
def test_no_draft_reads_the_adapter(family: str, tmp_path: Path) -> None:
    """Drafts' logits are equal to the last bit for different adapters."""
    new = partial(tiny_family, family)
    tree = Tree.chain(7, [8, 9, 3], probes=[90, 90])
    bare = Tree.chain(7, [8, 9, 3])

    def logits(lm: PreTrainedModel, tree: Tree) -> torch.Tensor:
        runner = Runner(lm, capacity=32, max_rows=8, batch=3)
        runner.prefill(PROMPTS)
        return torch.stack(logits_of(runner, [tree] * 3))

    first, second = (
        gate_model(new(), write_adapter(new(), tmp_path / str(seed), seed=seed))
        for seed in (1, 2)
    )
    assert torch.equal(logits(first, bare), logits(new(), bare))
    result, changed = (logits(lm, tree) for lm in (first, second))
    assert torch.equal(result[:, :4], changed[:, :4])
    assert (result[:, 4:] != changed[:, 4:]).any(-1).all()


@pytest.mark.parametrize(
    "planner", [FixedPlanner(3), FixedPlanner(3, 2), FixedPlanner(3, "all", 6, 2)]
)
def test_every_planner_writes_the_base_models_text(
    planner: FixedPlanner, tmp_path: Path
) -> None:
    """Greedy, in a batch, with the same steps in fixed shapes."""
    adapter = write_adapter(tiny("llama"), tmp_path, trainable_token_indices=[90])
    requests = [Request(prompt) for prompt in PROMPTS]
    plain = steps_of(tiny("llama"), Drafters, requests, tokens=30)
    gated = gate_model(tiny("llama"), adapter)
    dynamic, static = (
        steps_of(
            gated,
            partial(by_tokens, [90], planner),
            requests,
            tokens=30,
            static=static,
        )
        for static in (False, True)
    )
    assert collect(dynamic, 3)[0] == collect(plain, 3)[0]
    assert dynamic == static
