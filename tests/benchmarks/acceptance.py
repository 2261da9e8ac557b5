"""Which accepts more at a node: verification by ratio, or the keyed pick?

    python -m tests.benchmarks.acceptance [--V 1000] [--pairs 200] [--noises 100]

p is the softmax of normal logits, q that of the same logits with normal noise of `distance` added: TV is
their total variation. Of k candidates

    ratio   are draws from q without replacement, accepted as ratio.py says
    pick    are the k highest of log q + G, and the target picks the highest of log p + G, with the same
            Gumbel noise G: accepted if it is among them (pick.py)
    top     are the k likeliest by q, for a pick whose noise the draft does not know

The figures are means over the pairs and over the draws, with the standard error of ratio - pick over the
pairs. 1 - TV is what one candidate can reach at most. The last line is JSON.
"""

import argparse
import json
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from infer.engine.pick import Logits, draw, gumbel, law, probabilities
from infer.engine.sampling import Sampling

SAMPLINGS = {
    "T=1": Sampling(1.0),
    "T=0.7 top_p=0.7": Sampling(0.7, 0, 0.7),  # the paper's (Appendix A)
    "T=1 top_k=10 top_p=0.95": Sampling(1.0, 10, 0.95),
}
DISTANCES = (0.25, 0.5, 1.0, 2.0)


def accepted(p_V: Tensor, q_V: Tensor, k: int, noises: int, generator: torch.Generator) -> Sequence[float]:
    """The chances by ratio, pick and top, from so many draws."""
    p, q = p_V.expand(noises, -1), q_V.expand(noises, -1)
    ids = draw(q, k, generator)
    ratio = law(p, q, ids).gather(1, ids.clamp(min=0)) * (ids >= 0)
    seeds = torch.randint(2**62, (noises,), generator=generator)
    G = gumbel(seeds, torch.zeros_like(seeds), torch.arange(len(p_V)).expand(noises, -1))
    picked = (p.log() + G).argmax(-1, keepdim=True)
    scores, leaders = (q.log() + G).topk(k)
    keyed = ((leaders == picked) & (scores > float("-inf"))).any(1)
    likeliest, top = q_V.topk(k)
    return float(ratio.sum(1).mean()), float(keyed.double().mean()), float(p_V[top][likeliest > 0].sum())


def logits_of(values: Tensor) -> Logits:
    return Logits(nn.Identity(), values, values)


def compare(sampling: Sampling, distance: float, args: argparse.Namespace) -> list[dict[str, float]]:
    """One row for each k."""
    generator = torch.Generator().manual_seed(args.seed)
    values = args.spread * torch.randn(args.pairs, args.V, generator=generator)
    noise = distance * torch.randn(values.shape, generator=generator)
    p, q = (probabilities(logits_of(x), sampling) for x in (values, values + noise))
    TV, rows = float((p - q).abs().sum(1).mean() / 2), []
    for k in args.k:
        found = torch.tensor([accepted(p[i], q[i], k, args.noises, generator) for i in range(args.pairs)])
        ratio, pick, top = found.mean(0).tolist()
        error = float((found[:, 0] - found[:, 1]).std() / args.pairs**0.5)
        shares = {"ratio": ratio, "pick": pick, "top": top, "error": error}
        rows.append({"distance": distance, "TV": TV, "k": k, **shares})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--V", type=int, default=1000)
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of p's logits")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--noises", type=int, default=100)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name, sampling in SAMPLINGS.items():
        heads = f"{'distance':>8} {'1-TV':>6} {'k':>2} {'ratio':>6} {'pick':>6} {'top':>6} {'ratio-pick':>16}"
        print(f"{name}\n{heads}")
        results[name] = [row for distance in DISTANCES for row in compare(sampling, distance, args)]
        for row in results[name]:
            difference = f"{row['ratio'] - row['pick']:+.3f} +- {row['error']:.3f}"
            print(
                f"{row['distance']:8.2f} {1 - row['TV']:6.3f} {row['k']:2} {row['ratio']:6.3f} "
                f"{row['pick']:6.3f} {row['top']:6.3f} {difference:>16}"
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
