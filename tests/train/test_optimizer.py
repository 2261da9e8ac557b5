"""Compare Muon for all matrices of a shape at once with PyTorch's Muon."""

import pytest
import torch

from train import optimizer
from train.optimizer import MuonByShape, orthogonalize

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
