"""Verification by ratio: any draft's draws, the target's distribution (GSD §3; Leviathan et al., 2023).

Plain decoding draws the token after a node from the target's p. Here the draft has drawn candidates
c_1 .. c_k for it from its own q, one after the other and none of them twice. With r_1 = p, q_1 = q:

    c_i is accepted with the chance  min(1, r_i(c_i) / q_i(c_i)); where it is not,
    r_{i+1} = norm(max(r_i - q_i, 0))    what q_i gave too little of
    q_{i+1} = norm(q_i without c_i)      what c_{i+1} was drawn from

and where none is, the token is drawn from r_{k+1}. For every i, c_i ~ q_i: what is accepted,
min(r_i, q_i), and what is left, max(r_i - q_i, 0), add up to r_i; so from the last candidate to the
first, and all draws taken together, the token is distributed as p (Jeon et al., 2024). What is left
never is a rejected candidate: it was rejected because r_i(c_i) < q_i(c_i), so r_{i+1}(c_i) = 0, and
nothing is ever added to r again. A token is therefore accepted exactly where it is a child.

This wants that nothing but q_i decides the candidate. Whether a node has candidates, and how many,
must be settled before they are drawn, and none may be left out or moved once they are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def draw(q_nV: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """(n, k) ids, drawn from each row of `q_nV` without replacement, in the order of drawing.

    A row of fewer than k tokens of positive probability is filled up with -1. By an exponential race
    (Gumbel top-k in other words): the first to arrive are draws without replacement, in their order.
    torch.multinomial races too, but does not say what it does where tokens run out.
    """
    q = q_nV.double()
    # Tensor.exponential_ takes three times as long. No time is 0; only what cannot be drawn never arrives.
    times = -torch.rand(q.shape, dtype=q.dtype, device=q.device, generator=generator).log()
    speeds, ids = (q / times).topk(min(k, q.shape[1]))
    return F.pad(ids.masked_fill(speeds == 0, -1), (0, k - ids.shape[1]), value=-1)


def law(p_nV: Tensor, q_nV: Tensor, ids_nk: Tensor) -> Tensor:
    """(n, V) float64 distribution of the token after each node, given the candidates drawn for it.

    `p_nV` are the target's probabilities, `q_nV` those that `ids_nk` were drawn from by `draw`: of the
    first tokens, where the draft model lacks the others.
    """
    r, q = p_nV.double(), F.pad(q_nV.double(), (0, p_nV.shape[1] - q_nV.shape[1]))
    result, rejected = torch.zeros_like(r), torch.ones_like(r[:, :1])  # (n, 1) the chance that all were
    for c in ids_nk.split(1, dim=1):
        tried, c = c >= 0, c.clamp(min=0)
        chance = torch.where(tried, r.gather(1, c) / q.gather(1, c), 0).clamp(max=1)
        result.scatter_add_(1, c, rejected * chance)
        rejected = rejected * (1 - chance)
        r, q = (
            torch.where(tried, _norm((r - q).clamp(min=0)), r),
            torch.where(tried, _norm(q.scatter(1, c, 0)), q),
        )
    return result + rejected * r


def _norm(x_nV: Tensor) -> Tensor:
    """Rows that sum to 1; a row of zeros stays one."""
    return F.normalize(x_nV, p=1, dim=1, eps=torch.finfo(x_nV.dtype).tiny)
