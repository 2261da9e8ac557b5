"""Compare Muon for all matrices of a shape at once with PyTorch's Muon."""

import pytest
import torch

from train import optimizer
from train.config import OptimizerConfig
from train.optimizer import (
    MuonByShape,
    build_optimizer,
    orthogonalize,
    parameter_groups,
)

SHAPES = [(8, 40), (40, 8), (8, 40), (16, 16), (8, 40), (40, 8)]


@pytest.mark.parametrize("native", [True, False], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("at_once", [2**26, 8 * 40], ids=["all", "one"])
def test_three_steps_equal_pytorchs(
    native: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch iterates in bfloat16; a CPU without bfloat16 instructions emulates it."""
    monkeypatch.setattr(optimizer, "cpu_has_bfloat16", lambda: native)
    monkeypatch.setattr(optimizer, "MAX_STACKED", at_once)
    results = []
    for kind in (MuonByShape, torch.optim.Muon):
        generator = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(shape, generator=generator))
            for shape in SHAPES
        ]
        before = [param.detach().clone() for param in params]
        muon = kind(params, lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            muon.step()
        results.append([p.detach() - b for p, b in zip(params, before, strict=True)])
        assert all("momentum_buffer" in muon.state[param] for param in params)
    for result, expected in zip(*results, strict=True):
        error = (result - expected).norm() / expected.norm()
        assert error < (1e-3 if native else 2e-2)


def test_singular_values_are_near_one() -> None:
    matrices = torch.randn(3, 6, 20, generator=torch.Generator().manual_seed(0))
    muon = torch.optim.Muon([torch.nn.Parameter(matrices[0])]).defaults
    result = orthogonalize(matrices, muon["ns_coefficients"], 5, muon["eps"])
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6 and values.max() < 1.3


def test_the_weights_of_all_experts_are_trained_by_adamw() -> None:
    """Bug: PyTorch's Muon refused the tensor of three dimensions in a traceback."""
    module = torch.nn.Linear(4, 8)
    module.experts = torch.nn.Parameter(torch.ones(3, 4, 8))
    config = OptimizerConfig("muon")
    groups = parameter_groups(module, config)
    assert [(len(group["params"]), group["muon"]) for group in groups] == [
        (1, True),
        (1, False),
        (1, False),
    ]
    assert groups[1]["weight_decay"] == config.weight_decay
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    build_optimizer(groups, config).step()
    assert (module.experts < 1).all()


def test_rates_and_decay_of_embeddings_rows_and_matrices() -> None:
    """Rows of adaptive ids have a rate of their own; they and embeddings have no decay."""
    module = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(5, 4),
            "trainable_tokens": torch.nn.ParameterDict({"row": torch.ones(2, 4)}),
            "linear": torch.nn.Linear(4, 8),
        }
    )
    groups = parameter_groups(module, OptimizerConfig("adamw", rows_rate=7.0))
    facts = {id(p): (g["rate"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert {name: facts[id(p)] for name, p in module.named_parameters()} == {
        "embed.weight": (1.0, 0.0),
        "trainable_tokens.row": (7.0, 0.0),
        "linear.weight": (1.0, 0.1),
        "linear.bias": (1.0, 0.0),
    }
