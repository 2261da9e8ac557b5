"""Build the optimizer: AdamW for all trained parameters, or Muon for matrices and AdamW for the rest.

Muon moves a matrix by the momentum of its gradient, with all singular values set near 1 by
Newton-Schulz iterations (arXiv 2502.16982). The update is scaled to the usual size of
AdamW's, 0.2 sqrt(max(rows, columns)) times the learning rate.

torch.optim.Muon updates one matrix at a time by 20 small operations. On a GPU, launching
them takes as long as the forward pass of a small model. Here each operation updates all
matrices of one shape.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conf.devices.dtype import cpu_has_bfloat16
from train.config import OptimizerConfig

MAX_STACKED = 2**26  # elements of the matrices that one operation of Muon updates
WIDE = 4  # a matrix is wide if it has at least this many columns per row


def parameter_groups(
    module: nn.Module, config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return the trained parameters in groups with their weight decay, rate and optimizer.

    Norms, biases and embeddings have no weight decay. `rate` multiplies the schedule's
    learning rate. Only matrices use Muon; the weights of all experts of a layer, which
    are one tensor of three dimensions, use AdamW.
    """
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    # peft's name for the trained rows of an embedding.
    rows = {
        id(p) for name, p in module.named_parameters() if "trainable_tokens" in name
    }
    trained = [p for p in module.parameters() if p.requires_grad]
    # ZeRO 3 flattens a weight and stores its shape as ds_shape.
    matrices = {id(p) for p in trained if len(getattr(p, "ds_shape", p.shape)) >= 2}
    matrices -= embeddings | rows
    decayed = [p for p in trained if id(p) in matrices]
    muon = {id(p) for p in decayed if config.name == "muon" and p.dim() == 2}
    adaptive = [p for p in trained if id(p) in rows]
    plain = [p for p in trained if id(p) not in matrices | rows]
    groups = [
        ([p for p in decayed if id(p) in muon], config.weight_decay, 1.0, True),
        ([p for p in decayed if id(p) not in muon], config.weight_decay, 1.0, False),
        (plain, 0.0, 1.0, False),
        (adaptive, 0.0, config.rows_rate, False),
    ]
    return [
        {"params": params, "weight_decay": decay, "rate": rate, "muon": muon}
        for params, decay, rate, muon in groups
        if params
    ]


def build_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return the optimizer for the groups of `parameter_groups`."""
    betas = config.beta1, config.beta2
    if config.name == "muon":
        return MuonAdamW(groups, config.lr, betas)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for groups with `muon`, AdamW for the other groups, in one optimizer with one state.

    DeepSpeed and its checkpoints support only one optimizer.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]
    ) -> None:
        matrices = [group for group in groups if group["muon"]]
        rest = [group for group in groups if not group["muon"]]
        self._parts: dict[bool, torch.optim.Optimizer] = {}
        if matrices:
            self._parts[True] = MuonByShape(matrices, lr=lr)
        if rest:
            self._parts[False] = torch.optim.AdamW(rest, lr=lr, betas=betas, fused=True)
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step with both optimizers; `closure` is not called."""
        for muon, part in self._parts.items():
            # Assign groups and state in each step: loading a checkpoint replaces them.
            part.param_groups = [g for g in self.param_groups if g["muon"] == muon]
            part.state = self.state
            part.step()


class MuonByShape(torch.optim.Muon):
    """PyTorch's Muon at AdamW's scale, which updates all matrices of one shape together."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step; `closure` is not called."""
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            buffers: list[Tensor] = []
            self._init_group(group, params, grads, buffers)
            if not params:
                continue
            lr, momentum = group["lr"], group["momentum"]
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
            updates = torch._foreach_lerp(grads, buffers, momentum)
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            for indices in _by_shape(params):
                directions = orthogonalize(
                    torch.stack([updates[i] for i in indices]),
                    group["ns_coefficients"],
                    group["ns_steps"],
                    group["eps"],
                )
                scale = 0.2 * max(directions.shape[1:]) ** 0.5
                torch._foreach_add_(
                    [params[i] for i in indices],
                    list(directions.unbind()),
                    alpha=-lr * scale,
                )


def _by_shape(params: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of matrices of one shape, with at most MAX_STACKED elements together."""
    by_shape = defaultdict(list)
    for index, param in enumerate(params):
        by_shape[param.shape].append(index)
    for shape, indices in by_shape.items():
        count = max(1, MAX_STACKED // shape.numel())
        for start in range(0, len(indices), count):
            yield indices[start : start + count]


def orthogonalize(
    matrices: Tensor, coefficients: Iterable[float], steps: int, eps: float
) -> Tensor:
    """Set the singular values of (n, a, b) matrices near 1, by Newton-Schulz steps.

    It computes in bfloat16 like PyTorch's Muon, and in float32 on a CPU without bfloat16
    instructions. To save operations there, it iterates a square matrix Q instead of a wide
    X, since each step multiplies X by a square matrix: the iterate is Q X, and with
    G = X Xᵀ the next step needs (Q X)(Q X)ᵀ = Q G Qᵀ.
    """
    a, b, c = coefficients
    emulated = matrices.is_cpu and not cpu_has_bfloat16()
    x = matrices.to(torch.float32 if emulated else torch.bfloat16)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    if emulated and x.shape[2] >= WIDE * x.shape[1]:
        gram = x @ x.mT
        q = torch.eye(x.shape[1]).expand_as(gram)
        for _ in range(steps):
            q = _newton_schulz(q, q @ gram @ q.mT, a, b, c)
        x = q @ x
    else:
        for _ in range(steps):
            x = _newton_schulz(x, x @ x.mT, a, b, c)
    return (x.mT if tall else x).to(matrices.dtype)


def _newton_schulz(x: Tensor, gram: Tensor, a: float, b: float, c: float) -> Tensor:
    """Return a x + (b A + c A²) x, with A = `gram`."""
    return torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
