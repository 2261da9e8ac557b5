"""The optimizer: AdamW for all that is trained, or Muon for its matrices.

Muon's update of a matrix is its gradient's momentum with all singular values near 1, by
Newton-Schulz iterations (arXiv 2502.16982). It is scaled to AdamW's usual size,
0.2 sqrt(max(rows, columns)) times the learning rate.

torch.optim.Muon updates one matrix after the other, each by 20 small operations: on a GPU
their launches take as long as a small model's forward. Here all matrices of a shape are
iterated at once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conf.devices.dtype import cpu_has_bfloat16
from train.config import OptimizerConfig

AT_ONCE = 2**26  # numbers of the matrices that Muon iterates together
WIDE = 4  # columns of a wide matrix, for each row


def parameter_groups(
    module: nn.Module, config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return the trained parameters; norms, biases and embeddings have no weight decay.

    `rate` is a group's learning rate as a multiple of the schedule's. Muon is for
    matrices alone.
    """
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    # peft's name for single rows of an embedding
    rows = {
        id(p) for name, p in module.named_parameters() if "trainable_tokens" in name
    }
    trained = [p for p in module.parameters() if p.requires_grad]
    # ZeRO 3 flattens a weight and stores its shape elsewhere.
    matrices = {id(p) for p in trained if len(getattr(p, "ds_shape", p.shape)) >= 2}
    matrices -= embeddings | rows
    decayed = [p for p in trained if id(p) in matrices]
    adaptive = [p for p in trained if id(p) in rows]
    plain = [p for p in trained if id(p) not in matrices | rows]
    groups = [
        (decayed, config.weight_decay, 1.0, config.name == "muon"),
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
    """Return the optimizer of `parameter_groups`."""
    betas = config.beta1, config.beta2
    if config.name == "muon":
        return MuonAdamW(groups, config.lr, betas)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for groups with `muon`, AdamW for the others, with one state.

    DeepSpeed and checkpoints know one optimizer.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]
    ) -> None:
        matrices = [group for group in groups if group["muon"]]
        others = [group for group in groups if not group["muon"]]
        self._parts: dict[bool, torch.optim.Optimizer] = {}
        if matrices:
            self._parts[True] = MuonByShape(matrices, lr=lr)
        if others:
            self._parts[False] = torch.optim.AdamW(
                others, lr=lr, betas=betas, fused=True
            )
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step of both; `closure` is not called."""
        for muon, part in self._parts.items():
            # Loading a state replaces them.
            part.param_groups = [g for g in self.param_groups if g["muon"] == muon]
            part.state = self.state
            part.step()


class MuonByShape(torch.optim.Muon):
    """PyTorch's Muon at AdamW's scale, for all matrices of a shape at once."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step; `closure` is not called."""
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
            for places in _by_shape(params):
                directions = orthogonalize(
                    torch.stack([updates[i] for i in places]),
                    group["ns_coefficients"],
                    group["ns_steps"],
                    group["eps"],
                )
                scale = 0.2 * max(directions.shape[1:]) ** 0.5
                torch._foreach_add_(
                    [params[i] for i in places],
                    list(directions.unbind()),
                    alpha=-lr * scale,
                )


def _by_shape(params: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the places of matrices of one shape, of at most AT_ONCE numbers together."""
    places = defaultdict(list)
    for place, param in enumerate(params):
        places[param.shape].append(place)
    for shape, same in places.items():
        count = max(1, AT_ONCE // shape.numel())
        for start in range(0, len(same), count):
            yield same[start : start + count]


def orthogonalize(
    matrices: Tensor, coefficients: Iterable[float], steps: int, eps: float
) -> Tensor:
    """Return (n, a, b) matrices with all singular values near 1, by Newton-Schulz steps.

    In bfloat16, as PyTorch's Muon; in float32 on a CPU that has no instructions for it.
    There the steps of wide matrices X are those of Q in Q X, for few operations: with
    G = X Xᵀ, each step's X Xᵀ is Q G Qᵀ.
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
