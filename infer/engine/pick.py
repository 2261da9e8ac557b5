"""From logits to one token per node: the only verifier.

A draft is accepted where it equals the pick, so the output is what the picks alone give. Sampling
draws by Gumbel noise that depends on the seed, the position and the token, and on nothing else: one
draw for each place of the text, whatever was drafted there. So sampled output with drafts is token
for token the sampled output without, and drafts that see the same noise are right more often
(Gumbel coupling: Daliri, Musco, Suresh, 2024).

In bfloat16 and float16 a near-tie would depend on how many rows the forward had, so the likeliest tokens'
logits are computed again in float32, from the same hidden rows (`Logits`).

Verification by ratio: any draft's draws, the target's distribution (GSD §3; Leviathan et al., 2023).

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

from functools import lru_cache
from math import log
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.engine.sampling import Sampling

RESCORED = 8  # top logits computed again in float32
BLOCK = 64


class Logits:
    """n rows of logits over V tokens, read by their top or whole; at least float32."""

    def __init__(self, head: nn.Module, hidden_nd: Tensor, logits_nV: Tensor) -> None:
        self._head = head
        self._hidden = hidden_nd
        self._logits = logits_nV
        self._narrow = logits_nV.dtype.itemsize < 4

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, rows: slice | list[int]) -> "Logits":
        return Logits(self._head, self._hidden[rows], self._logits[rows])

    def replaced(self, logits_nV: Tensor) -> "Logits":
        """Return the same rows with other logits of full precision."""
        return Logits(self._head, self._hidden, logits_nV)

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self._logits.device

    @property
    def vocabulary(self) -> int:
        """V."""
        return self._logits.shape[-1]

    def top(self, m: int) -> tuple[Tensor, Tensor]:
        """Return (n, m) logits in falling order, and their ids; m is at most V."""
        if not self._narrow:
            return top(self._logits, m)
        ids = top(self._logits, min(max(m, RESCORED), self.vocabulary))[1]
        values = self._logits.gather(1, ids).float()
        values[:, :RESCORED] = self._exact(ids[:, :RESCORED])
        order = values.argsort(dim=1, descending=True, stable=True)[:, :m]
        return values.gather(1, order), ids.gather(1, order)

    def whole(self) -> Tensor:
        """Return (n, V) logits."""
        if not self._narrow:
            return self._logits
        ids = top(self._logits, min(RESCORED, self.vocabulary))[1]
        return self._logits.float().scatter(1, ids, self._exact(ids))

    def chances(self) -> Tensor:
        """Return (n, V) probabilities, as the logits come: a near-tie among them decides nothing."""
        return self._logits.softmax(
            -1, dtype=torch.promote_types(self._logits.dtype, torch.float32)
        )

    def _exact(self, ids_nt: Tensor) -> Tensor:
        weight_ntd = F.embedding(ids_nt, self._head.weight).float()  # type: ignore[arg-type]
        values = torch.bmm(weight_ntd, self._hidden.float()[..., None])[..., 0]
        bias = getattr(self._head, "bias", None)
        return values if bias is None else values + bias[ids_nt].float()


def top(values_nV: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Compute torch.topk over long rows: the m largest lie in the m blocks of the largest maxima. On a CPU four
    times as fast at 32,000 columns.
    """
    n, V = values_nV.shape
    blocks = V // BLOCK
    if blocks <= 2 * m:
        return tuple(values_nV.topk(m, dim=1))  # type: ignore[return-value]
    maxima = values_nV[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK)).amax(-1)
    chosen = maxima.topk(m, dim=1).indices
    device = values_nV.device
    ids = (chosen[..., None] * BLOCK + torch.arange(BLOCK, device=device)).flatten(1)
    rest = torch.arange(blocks * BLOCK, V, device=device).expand(n, -1)
    ids = torch.cat([ids, rest], dim=1)
    result = values_nV.gather(1, ids).topk(m, dim=1)
    return result.values, ids.gather(1, result.indices)


WIDE = 128  # tokens looked at first where no top_k cuts
LEADERS = 8  # candidates among which a weight is a share
Ints = TypeVar("Ints", Tensor, np.ndarray)  # int64
_UNSIGNED = 2**64 - 1


def pick(
    logits: Logits, sampling: Sampling, positions: Tensor, seeds: Tensor
) -> Tensor:
    """Return (n,) the token of each row; `positions` (n,) are those that the tokens will have."""
    if not sampling.temperature:
        return logits.top(1)[1][:, 0]
    values, ids = warped(logits, sampling)
    return _best(values + gumbel(seeds, positions, ids).to(values.dtype), ids, 1)[1][
        :, 0
    ]


def candidates(
    logits: Logits, sampling: Sampling, positions: Tensor, seeds: Tensor, m: int
) -> tuple[Tensor, Tensor]:
    """Return (n, m) ids, the likeliest to be picked first, by the known noise where text is sampled, and (n, m)
    weights, their share among the leaders; 0 of scores beyond all numbers.
    """
    scores, ids = leaders(logits, sampling, positions, seeds, max(m, LEADERS))
    return ids[:, :m], scores.softmax(-1).nan_to_num(0.0)[:, :m]


def leaders(
    logits: Logits, sampling: Sampling, positions: Tensor, seeds: Tensor, m: int
) -> tuple[Tensor, Tensor]:
    """Return (n, up to m) the highest scores, falling, and their ids: of those that may be drawn."""
    if not sampling.temperature:
        return logits.top(min(m, logits.vocabulary))
    # Drafts may miss a token far down that the noise lifts; a pick may not.
    values, ids = warped(logits, sampling, most=WIDE)
    return _best(values + gumbel(seeds, positions, ids).to(values.dtype), ids, m)


def likeliest(
    logits: Logits, sampling: Sampling, positions: Tensor, seeds: Tensor, m: int
) -> tuple[Tensor, Tensor]:
    """Return (n, m) chances of the m tokens likeliest to be picked, falling, and their ids: of sampled text,
    whose noise is known, shares of the perturbed scores; 0 of scores beyond all numbers.
    """
    if not sampling.temperature:
        return top(logits.chances(), min(m, logits.vocabulary))
    values, ids = warped(logits, sampling, most=WIDE)
    noisy = values + gumbel(seeds, positions, ids).to(values.dtype)
    result, ids = _best(noisy, ids, m)
    return (result - noisy.logsumexp(-1, keepdim=True)).exp().nan_to_num(0.0), ids


def probabilities(logits: Logits, sampling: Sampling) -> Tensor:
    """Return (n, V) float64: what `pick` draws from, where it samples."""
    values, ids = warped(logits, sampling)
    shares = values.double().softmax(-1)
    return shares.new_zeros(len(logits), logits.vocabulary).scatter(1, ids, shares)


def warped(
    logits: Logits, sampling: Sampling, *, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return (n, m) log-probabilities (up to a constant) and ids of the tokens that may be drawn, `most` at
    most; those cut off among them are -inf.
    """
    temperature = sampling.temperature
    V = logits.vocabulary
    if sampling.top_k:
        values, ids = logits.top(min(sampling.top_k, V))
        values = values / temperature
        return nucleus(values, sampling.top_p, values.logsumexp(-1, keepdim=True)), ids
    whole = logits.whole() / temperature
    if sampling.top_p == 1 and most is None:
        return whole, torch.arange(V, device=whole.device).expand(len(whole), -1)
    total = whole.logsumexp(-1, keepdim=True)
    m = min(most or WIDE, V)
    values, ids = top(whole, m)
    # On a GPU the question would wait for the device; there a sort of all tokens costs little.
    if most is None and (
        whole.device.type != "cpu"
        or not ((values - total).exp().sum(-1) >= sampling.top_p).all()
    ):
        values, ids = whole.sort(dim=1, descending=True)
    return nucleus(values, sampling.top_p, total), ids


def _best(noisy: Tensor, ids: Tensor, m: int) -> tuple[Tensor, Tensor]:
    values, order = top(noisy, min(m, noisy.shape[1]))
    return values, ids.gather(1, order)


def nucleus(values: Tensor, top_p: float, total: Tensor) -> Tensor:
    """Set `values`, falling, behind the first that reach the share `top_p` of `total` to -inf."""
    if top_p == 1:
        return values
    before = (values - total).exp().cumsum(-1).roll(1, dims=-1)
    before[:, 0] = 0
    return values.masked_fill(before >= top_p, float("-inf"))


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return (n, m) float64 standard Gumbel noise: a function of seed, position and id alone.

    `seeds` and `positions` (n,), `ids` (n, m), all int64; the same on every device.
    """
    if ids.device.type == "cpu":
        # Some fifty operations on a few numbers each: NumPy's calls take a third of the time of PyTorch's.
        bits = torch.from_numpy(_hashed(seeds.numpy(), positions.numpy(), ids.numpy()))
    else:
        bits = _hashed(seeds, positions, ids)
    uniform = bits.double() * 2.0**-52 + 2.0**-53  # never 0, never 1
    return -(-uniform.log()).log()


def noise(seed: int, position: int, id: int) -> float:
    """Return `gumbel` of one token, up to rounding: for the few tokens of a draft an array takes longer."""
    bits = _mixed_one(_key(seed, position) ^ _key(id)) >> 12
    return -log(-log(bits * 2.0**-52 + 2.0**-53))


@lru_cache(maxsize=1 << 16)
def _key(number: int, position: int | None = None) -> int:
    mixed = _mixed_one(number)
    return mixed if position is None else _mixed_one(mixed ^ position)


def _mixed_one(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _UNSIGNED
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _UNSIGNED
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _UNSIGNED
    return x ^ (x >> 31)


def _hashed(seeds: Ints, positions: Ints, ids: Ints) -> Ints:
    key = _mixed(_mixed(seeds) ^ positions)
    return _shifted(_mixed(key[:, None] ^ _mixed(ids)), 12)


def _mixed(x: Ints) -> Ints:
    """Apply SplitMix64's step and finalizer to int64, which wraps around as its unsigned numbers do."""
    x = x + -0x61C8864680B583EB  # 0x9E3779B97F4A7C15
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ _shifted(x, 31)


def _shifted(x: Ints, bits: int) -> Ints:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw(q_nV: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Return (n, k) ids drawn from each row of `q_nV` without replacement, in order; -1 where tokens run out.

    By an exponential race (Gumbel top-k in other words). torch.multinomial does not say what it does where
    tokens run out.
    """
    q = q_nV.double()
    # Tensor.exponential_ takes three times as long. No time is 0; only what cannot be drawn never arrives.
    times = -torch.rand(
        q.shape, dtype=q.dtype, device=q.device, generator=generator
    ).log()
    speeds, ids = (q / times).topk(min(k, q.shape[1]))
    return F.pad(ids.masked_fill(speeds == 0, -1), (0, k - ids.shape[1]), value=-1)


def conditional_distribution(p_nV: Tensor, q_nV: Tensor, ids_nk: Tensor) -> Tensor:
    """Return (n, V) float64 distribution of the token after each node, given the candidates drawn for it.

    `p_nV` are the target's probabilities, `q_nV` those that `ids_nk` were drawn from by `draw`: of the
    first tokens, where the draft model lacks the others.
    """
    r = p_nV.double()
    q = F.pad(q_nV.double(), (0, p_nV.shape[1] - q_nV.shape[1]))
    # (n, 1) the chance that all were
    result = torch.zeros_like(r)
    rejected = torch.ones_like(r[:, :1])
    for c in ids_nk.split(1, dim=1):
        tried = c >= 0
        c = c.clamp(min=0)
        chance = torch.where(tried, r.gather(1, c) / q.gather(1, c), 0).clamp(max=1)
        result.scatter_add_(1, c, rejected * chance)
        rejected = rejected * (1 - chance)
        rest = _norm((r - q).clamp(min=0))
        left = _norm(q.scatter(1, c, 0))
        r = torch.where(tried, rest, r)
        q = torch.where(tried, left, q)
    return result + rejected * r


def _norm(x_nV: Tensor) -> Tensor:
    """Scale rows to sum to 1; a row of zeros stays one."""
    return F.normalize(x_nV, p=1, dim=1, eps=torch.finfo(x_nV.dtype).tiny)
