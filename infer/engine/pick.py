"""Choose the model's token after each node from its logits: the only verifier.

Verification by pick. A draft is accepted if it equals the pick, so the output consists of
picks only. Sampling adds Gumbel noise that depends only on the seed, the position and the
token: one draw for each place of the text, independent of the drafts. So sampled text is
the same with and without drafts, and drafts that use the same noise are accepted more
often (Gumbel coupling: Daliri, Musco, Suresh, 2024).

In bfloat16 and float16 a near-tie would depend on the number of rows in the forward. So
the logits of the likeliest tokens are computed again in float32 (`Logits`). This is also
done for a rounded head (rounded.py).

Verification by ratio. The draft model draws the drafts, and the emitted tokens have the
target's distribution (GSD §3; Leviathan et al., 2023). Plain decoding draws the token after
a node from the target's p. Here the draft model has drawn candidates c_1 .. c_k from its
own q, without replacement. With r_1 = p, q_1 = q:

    accept c_i with probability  min(1, r_i(c_i) / q_i(c_i)); if it is rejected,
    r_{i+1} = norm(max(r_i - q_i, 0))    the mass of r_i that q_i does not cover
    q_{i+1} = norm(q_i without c_i)      the distribution of c_{i+1}

If all are rejected, the token is drawn from r_{k+1}. For every i, c_i ~ q_i: accepted mass
min(r_i, q_i) and residual mass max(r_i - q_i, 0) add up to r_i. By induction from the last
candidate to the first, the token is distributed as p (Jeon et al., 2024). The residual never
contains a rejected candidate: r_i(c_i) < q_i(c_i), so r_{i+1}(c_i) = 0, and no later r has
mass there. So a draft is accepted if and only if the emitted token is a child of the node.

This requires that a candidate depends on q_i alone. The number of a node's candidates must
be decided before they are drawn, and no candidate may be dropped or moved afterwards.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.engine.native_choice import NativeRows
from infer.engine.noise import gumbel, keys_of, noisiest
from infer.engine.sampling import Sampling

RESCORED = 8  # the number of top logits that are computed again in float32
BLOCK = 64  # tokens of a block in `top`


class Logits:
    """n rows of logits over V tokens, in float32 or wider when they are read."""

    def __init__(
        self,
        head: nn.Module,
        hidden_nd: Tensor,
        logits_nV: Tensor,
        narrow: bool | None = None,
    ) -> None:
        self.hidden = hidden_nd
        self._head = head
        self._logits = logits_nV
        if narrow is None:
            narrow = logits_nV.dtype.itemsize < 4 or bool(
                getattr(head, "rounded", None)
            )
        self._narrow = narrow

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, rows: slice | list[int]) -> "Logits":
        return Logits(self._head, self.hidden[rows], self._logits[rows], self._narrow)

    def replaced(self, logits_nV: Tensor) -> "Logits":
        """Return the same rows with the given logits, which are not computed again."""
        return Logits(self._head, self.hidden, logits_nV, narrow=False)

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self._logits.device

    @property
    def vocabulary(self) -> int:
        """The number of tokens V."""
        return self._logits.shape[-1]

    def top(self, m: int) -> tuple[Tensor, Tensor]:
        """Return the (n, m) largest logits in decreasing order, and their ids; m is at most V."""
        if not self._narrow:
            return top(self._logits, m)
        values, ids = self._rescored(min(max(m, RESCORED), self.vocabulary))
        return values[:, :m], ids[:, :m]

    def whole(self) -> Tensor:
        """Return (n, V) logits."""
        if not self._narrow:
            return self._logits
        values, ids = self._rescored(min(RESCORED, self.vocabulary))
        return self._logits.float().scatter(1, ids, values)

    @property
    def native(self) -> NativeRows | None:
        """The rows for native.c; None for a head without it and for other types."""
        rows = getattr(self._head, "rows", None)
        again = RESCORED if self._narrow else 0
        native: NativeRows | None = rows and rows(self.hidden, self._logits, again)
        return native

    def chances(self) -> Tensor:
        """Return (n, V) probabilities without the float32 correction, for drafts only."""
        dtype = torch.promote_types(self._logits.dtype, torch.float32)
        return self._logits.softmax(-1, dtype=dtype)

    def _rescored(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the (n, count) largest logits in decreasing order, the RESCORED largest computed again."""
        if native := self.native:
            return native.top(count)
        ids = top(self._logits, count)[1]
        values = self._logits.gather(1, ids).float()
        values[:, :RESCORED] = self._exact(ids[:, :RESCORED])
        order = values.argsort(dim=1, descending=True, stable=True)
        return values.gather(1, order), ids.gather(1, order)

    def _exact(self, ids_nt: Tensor) -> Tensor:
        # On a CPU float32 sums depend on the number of rows; float64 costs no time here.
        wide = torch.float64 if ids_nt.device.type == "cpu" else torch.float32
        weight_ntd = F.embedding(ids_nt, self._head.weight).to(wide)  # type: ignore[arg-type]
        values = torch.bmm(weight_ntd, self.hidden.to(wide)[..., None])[..., 0]
        bias = getattr(self._head, "bias", None)
        return (values if bias is None else values + bias[ids_nt]).float()


def top(values_nV: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Compute torch.topk over long rows; four times as fast on a CPU at V = 32,000.

    The m largest values are in the m blocks with the largest maxima.
    """
    n, V = values_nV.shape
    blocks = V // BLOCK
    if blocks <= 2 * m:
        result = values_nV.topk(m, dim=1)
        return result.values, result.indices
    maxima = values_nV[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK)).amax(-1)
    chosen = maxima.topk(m, dim=1).indices
    device = values_nV.device
    ids = (chosen[..., None] * BLOCK + torch.arange(BLOCK, device=device)).flatten(1)
    rest = torch.arange(blocks * BLOCK, V, device=device).expand(n, -1)
    ids = torch.cat([ids, rest], dim=1)
    result = values_nV.gather(1, ids).topk(m, dim=1)
    return result.values, ids.gather(1, result.indices)


WIDE = 128  # the number of leading tokens that are considered first without top_k
WIDER = 16  # times as many are considered next, if a nucleus has more
LEADERS = 8  # a candidate's weight is its share among this many leading tokens


def pick(
    logits: Logits, sampling: Sampling, positions: Tensor, seeds: Tensor
) -> Tensor:
    """Return the token that each of n rows emits, (n,): the likeliest, or one sampled with keyed noise.

    `positions` (n,) are the positions of the picked tokens, one after the rows' positions. `seeds` (n,)
    and the positions key the noise, so the same seed gives the same text.
    """
    if not sampling.temperature:
        return logits.top(1)[1][:, 0]
    if native := logits.native:
        return native.pick(sampling, keys_of(seeds, positions))
    if logits.device.type == "cpu" and not sampling.top_k and sampling.top_p == 1:
        rows = logits.whole() / sampling.temperature
        keys = zip(seeds.tolist(), positions.tolist())
        return torch.tensor([noisiest(row, *key) for row, key in zip(rows, keys)])
    scores, ids = noisy(logits, sampling, positions, seeds)
    return _best(scores, ids, 1)[1][:, 0]


def candidates(
    logits: Logits, sampling: Sampling, positions: Tensor, seeds: Tensor, m: int
) -> tuple[Tensor, Tensor]:
    """Return the (n, m) ids that are likeliest to be picked, and their weights.

    Predictions of sampled text include its noise, which is known. A weight is the
    candidate's share among the LEADERS best candidates; it is 0 if scores overflow.
    """
    count = max(m, LEADERS)
    if sampling.temperature and (native := logits.native):
        keys = keys_of(seeds, positions)
        scores, ids = native.noisy_top(sampling, keys, WIDE, count)
    elif sampling.temperature:
        # A draft may miss an unlikely token with large noise, but a pick may not.
        scores, ids = noisy(logits, sampling, positions, seeds, most=WIDE)
        scores, ids = _best(scores, ids, count)
    else:
        scores, ids = logits.top(min(count, logits.vocabulary))
    total = scores[:, :LEADERS].logsumexp(-1, keepdim=True)
    weights = (scores - total).exp().nan_to_num(0.0)
    return ids[:, :m], weights[:, :m]


def likeliest(
    logits: Logits, sampling: Sampling, positions: Tensor, seeds: Tensor, m: int
) -> tuple[Tensor, Tensor]:
    """Return the (n, m) ids that are likeliest to be picked, and their probabilities.

    The noise of sampled text is known, so there the probabilities are the softmax of the
    noisy scores. They are 0 if scores overflow.
    """
    if not sampling.temperature:
        chances, ids = top(logits.chances(), min(m, logits.vocabulary))
        return ids, chances.nan_to_num(0.0)
    scores, ids = noisy(logits, sampling, positions, seeds, most=WIDE)
    total = scores.logsumexp(-1, keepdim=True)
    scores, ids = _best(scores, ids, m)
    return ids, (scores - total).exp().nan_to_num(0.0)


def noisy(
    logits: Logits,
    sampling: Sampling,
    positions: Tensor,
    seeds: Tensor,
    most: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `warped` log-probabilities with Gumbel noise added, and their ids."""
    values, ids = warped(logits, sampling, most=most)
    return values + gumbel(seeds, positions, ids).to(values.dtype), ids


def probabilities(logits: Logits, sampling: Sampling) -> Tensor:
    """Return the (n, V) float64 distribution that `pick` samples from."""
    if not sampling.top_k and sampling.top_p == 1:
        return (logits.whole() / sampling.temperature).double().softmax(-1)
    values, ids = warped(logits, sampling)
    shares = values.double().softmax(-1)
    return shares.new_zeros(len(logits), logits.vocabulary).scatter(1, ids, shares)


def warped(
    logits: Logits, sampling: Sampling, *, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return (n, m) log-probabilities, up to a constant, and ids of the tokens to sample.

    At most `most` tokens are returned. Tokens that top_p excludes have -inf.
    """
    temperature = sampling.temperature
    V = logits.vocabulary
    if sampling.top_k:
        values, ids = logits.top(min(sampling.top_k, V))
        values = values / temperature
        return nucleus(values, sampling.top_p, values.logsumexp(-1, keepdim=True)), ids
    if sampling.top_p == 1 and most is not None:
        values, ids = logits.top(min(most, V))
        return values / temperature, ids
    whole = logits.whole() / temperature
    if sampling.top_p == 1:
        return whole, torch.arange(V, device=whole.device).expand(len(whole), -1)
    total = whole.logsumexp(-1, keepdim=True)
    values, ids = _leading(whole, total, sampling.top_p, most)
    return nucleus(values, sampling.top_p, total), ids


def _leading(
    values_nV: Tensor, total_n1: Tensor, top_p: float, most: int | None
) -> tuple[Tensor, Tensor]:
    """Return `most` largest values, or by default at least the nucleus, and their ids."""
    V = values_nV.shape[1]
    if most is None and values_nV.device.type != "cpu":
        # A test of the nucleus would wait for the device, but sorting is cheap.
        return values_nV.sort(dim=1, descending=True)
    m = min(most or WIDE, V)
    values, ids = top(values_nV, m)
    while most is None and m < V:
        if ((values - total_n1).exp().sum(-1) >= top_p).all():
            break
        m = min(WIDER * m, V)
        values, ids = top(values_nV, m)
    return values, ids


def _best(scores: Tensor, ids: Tensor, m: int) -> tuple[Tensor, Tensor]:
    values, order = top(scores, min(m, scores.shape[1]))
    return values, ids.gather(1, order)


def nucleus(values: Tensor, top_p: float, total: Tensor) -> Tensor:
    """Set `values`, in decreasing order, to -inf after their total probability reaches `top_p`."""
    if top_p == 1:
        return values
    before = (values - total).exp().cumsum(-1).roll(1, dims=-1)
    before[:, 0] = 0
    return values.masked_fill(before >= top_p, float("-inf"))


def draw(q_nV: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Return (n, k) ids drawn from each row without replacement, in the order of the draws.

    Rows with fewer than k tokens of positive probability end with -1, where torch.multinomial
    is undefined. The method is an exponential race, equivalent to Gumbel top-k.
    """
    q = q_nV.double()
    # Tensor.exponential_ takes three times as long. No time is 0, because torch.rand is below
    # 1, so a token with probability 0 has speed 0.
    uniform = torch.rand(q.shape, dtype=q.dtype, device=q.device, generator=generator)
    times = -uniform.log()
    speeds, ids = (q / times).topk(min(k, q.shape[1]))
    ids = ids.masked_fill(speeds == 0, -1)
    return F.pad(ids, (0, k - ids.shape[1]), value=-1) if ids.shape[1] < k else ids


def conditional_distribution(p_nV: Tensor, q_nV: Tensor, ids_nk: Tensor) -> Tensor:
    """Return the (n, V) float64 distribution of the next token, given its candidates.

    `p_nV` are the target's probabilities. `ids_nk` were drawn by `draw` from `q_nV`, which has
    fewer columns if the draft model does not have the last tokens.
    """
    r = p_nV.double()
    q = q_nV.double()
    if missing := p_nV.shape[1] - q_nV.shape[1]:
        q = F.pad(q, (0, missing))
    result = torch.zeros_like(r)
    rejected = torch.ones_like(r[:, :1])  # the chance that all candidates were rejected
    absent = bool((ids_nk < 0).any())
    for i, c in enumerate(ids_nk.split(1, dim=1)):
        tried = c >= 0
        c = c.clamp(min=0)
        chance = (r.gather(1, c) / q.gather(1, c)).clamp_(max=1)
        if absent:
            chance = torch.where(tried, chance, 0)
        result.scatter_add_(1, c, rejected * chance)
        rejected = rejected * (1 - chance)
        if not rejected.any():
            return result  # common: the target finds such candidates likelier than the draft model
        rest = _norm((r - q).clamp_(min=0))
        r = torch.where(tried, rest, r) if absent else rest
        if i + 1 < ids_nk.shape[1]:
            left = _norm(q.scatter(1, c, 0))
            q = torch.where(tried, left, q) if absent else left
    return result + rejected * r


def _norm(x_nV: Tensor) -> Tensor:
    """Scale rows in place to sum to 1; a row of zeros stays zero."""
    # Equal to F.normalize, but for few tokens it takes half the time.
    total = torch.linalg.vector_norm(x_nV, 1, dim=1, keepdim=True)
    return x_nV.div_(total.clamp_(min=torch.finfo(x_nV.dtype).tiny))
