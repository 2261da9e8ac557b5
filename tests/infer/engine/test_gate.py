"""An adapter acts on probes and on nothing else, in both arrangements."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.engine.attention import ProbeGate
from infer.engine.gate import DENSE, GatedEmbedding, GatedLinear
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.loop import Drafter, Drafters, Limits, decode
from infer.models.gated import gate_model
from infer.trees.tree import Tree
from tests.infer.engine.test_families import FAMILIES, tiny
from tests.infer.gated import write_adapter
from tests.infer.library import collect, logits_of

PROMPTS = [[20, 30, 40, 51], [61, 62], [9] * 11]
RANKS = pytest.mark.parametrize("rank", [2, 24], ids=["low rank", "dense"])


@RANKS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("sequences", "first", "rows"), [(1, 1, 2), (1, 4, 9), (1, 0, 3), (3, 2, 7)]
)
def test_a_layer_is_the_base_models_before_the_gate_and_adapted_behind(
    rank: int, bias: bool, sequences: int, first: int, rows: int
) -> None:
    torch.manual_seed(0)
    base, gate = nn.Linear(32, 40, bias=bias), ProbeGate()
    a, b, x = (
        torch.randn(rank, 32),
        torch.randn(40, rank),
        torch.randn(sequences, rows, 32),
    )
    layer = GatedLinear(base, a, b, 0.5, gate)
    assert (layer.dense is None) == (
        a.numel() + b.numel() < DENSE * base.weight.numel()
    )
    with torch.inference_mode():
        assert torch.equal(layer(x), base(x))
        with gate.open(first, rows):
            y, flat = layer(x), layer(x.flatten(0, 1))
        assert torch.equal(layer(x), base(x))
        # Which rows share a product decides how it is rounded, and nothing else does.
        drafts = (
            base(x)[:, :first]
            if layer.dense is None
            else base(x[:, :first].flatten(0, 1))
        )
        slow = base(x) + 0.5 * (x @ a.T @ b.T)
    assert torch.equal(
        y[:, :first], drafts.reshape(sequences, first, 40)
    ) and torch.equal(y.flatten(0, 1), flat)
    torch.testing.assert_close(y[:, first:], slow[:, first:], rtol=1e-4, atol=1e-4)


def test_an_embeddings_own_rows_are_for_probes_alone() -> None:
    base, gate, rows = nn.Embedding(10, 4), ProbeGate(), torch.randn(2, 4)
    layer, ids = (
        GatedEmbedding(base, torch.tensor([7, 3]), rows, gate),
        torch.tensor([[7, 3, 5], [3, 7, 3]]),
    )
    assert torch.equal(layer(ids), base(ids))
    with gate.open(1, 3):
        y = layer(ids)
    assert torch.equal(y[:, 0], base(ids[:, 0])) and torch.equal(
        y[0, 2], base.weight[5]
    )
    assert torch.equal(y[0, 1], rows[1]) and torch.equal(y[1, 1:], rows)


@RANKS
@pytest.mark.parametrize("family", FAMILIES)
def test_no_draft_reads_the_adapter(family: str, rank: int, tmp_path: Path) -> None:
    """Drafts' logits to the last bit, whatever the adapter has learned; without probes the base model's."""
    kind, settings = FAMILIES[family]
    new = partial(tiny, kind, **settings)
    tree = Tree.chain(7, [8, 9, 3], probes=[90, 90])

    def logits(lm: PreTrainedModel, tree: Tree) -> torch.Tensor:
        runner = Runner(lm, capacity=32, max_rows=8, batch=3)
        runner.prefill(PROMPTS)
        return torch.stack(logits_of(runner, [tree] * 3))

    adapters = [
        write_adapter(new(), tmp_path / str(seed), seed=seed, r=rank) for seed in (1, 2)
    ]
    base, (item, other) = new(), [gate_model(new(), adapter) for adapter in adapters]
    bare = Tree.chain(7, [8, 9, 3])
    assert torch.equal(logits(item, bare), logits(base, bare))
    result, changed, expected = (logits(lm, tree) for lm in (item, other, base))
    assert torch.equal(result[:, :4], changed[:, :4])
    torch.testing.assert_close(result[:, :4], expected[:, :4], rtol=1e-4, atol=1e-4)
    assert (result[:, 4:] != changed[:, 4:]).any(-1).all()


@RANKS
def test_every_way_of_drafting_writes_the_base_models_text(
    rank: int, tmp_path: Path
) -> None:
    """Greedy, alone and side by side, however many nodes are probed; in fixed shapes step by step the same."""
    adapter = write_adapter(
        tiny("llama"), tmp_path, r=rank, trainable_token_indices=[90]
    )
    base, gated = tiny("llama"), gate_model(tiny("llama"), adapter)

    def decoded(
        lm: PreTrainedModel,
        prompts: list[list[int]],
        new: Callable[[], Drafter],
        static: bool,
    ) -> Any:
        runner = Runner(lm, capacity=64, max_rows=64, batch=len(prompts), static=static)
        requests = [Request(prompt) for prompt in prompts]
        return collect(
            decode(runner, requests, Drafters(new), Limits(30)), len(prompts)
        )

    plain = [decoded(base, [prompt], Drafter, False)[0][0] for prompt in PROMPTS]
    policies = [
        FixedPolicy(3),
        FixedPolicy(3, "all"),
        FixedPolicy(3, 2),
        FixedPolicy(3, "all", 6, 2),
    ]
    for new in (
        Drafter,
        *(partial(AdaptiveDrafter, [90], policy) for policy in policies),
    ):
        for static in (False, True):
            assert [
                decoded(gated, [prompt], new, static)[0][0] for prompt in PROMPTS
            ] == plain
        side_by_side = decoded(gated, PROMPTS, new, False)
        assert side_by_side[0] == plain and side_by_side == decoded(
            gated, PROMPTS, new, True
        )
