"""What the settings do to acceptance and to the number of drafts (GSD §6.3, Figure 5).

One setting at a time; all others as in Appendix A. Greedy; what is verified has the study's number of nodes.
"""

from typing import Any

from infer.config import DecodeConfig
from infer.study.bench import Bench
from infer.study.rates import (
    acceptance_rate,
    counts_of,
    drafted_per_token,
    drafted_share,
    fed_per_token,
    rank_shares,
)

VALUES: dict[str, tuple[float, ...]] = {
    "k": (1, 2, 3, 4, 5, 6),
    "tau": (0, 1, 2, 3, 4),
    "theta_prob": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
    "theta_sib": (0.0, 0.1, 0.3, 0.5, 0.7, 0.9),
}
RANKED = (0.0, 0.1, 0.3, 0.5, 0.7)  # θ_sib of Figure 8
CHILDREN = 4


def measure_ablation(bench: Bench) -> list[dict[str, Any]]:
    """GSD against each setting, and TSD against k."""
    rows = []
    for setting, values in VALUES.items():
        for method in ("gsd", "tsd") if setting == "k" else ("gsd",):
            for value in values:
                if setting == "tau" and value == 0 and bench.config.tau_reading == "gram":
                    continue
                figures = _figures(bench, bench.decode(method, **{setting: value}))
                rows.append({"setting": setting, "value": value, "method": method, **figures})
    return rows


def measure_ranks(bench: Bench) -> list[dict[str, Any]]:
    """Which child was accepted, by method and by θ_sib of GSD (Figures 7 and 8)."""
    ways = {("method", method): bench.decode(method) for method in ("ssd", "tsd", "gsd")}
    ways |= {("theta_sib", str(value)): bench.decode("gsd", theta_sib=value) for value in RANKED}
    rows = []
    for (by, value), decode in ways.items():
        counts = counts_of(bench.run(decode))
        accepted = sum(len(one.ranks) for one in counts)
        rows.append({"by": by, "value": value, "accepted": accepted, "shares": rank_shares(counts, CHILDREN)})
    return rows


def _figures(bench: Bench, decode: DecodeConfig) -> dict[str, Any]:
    runs = bench.run(decode)
    return {
        "acceptance_rate": acceptance_rate(runs),
        "drafted_share": drafted_share(runs),
        "drafted_per_token": drafted_per_token(runs),
        "fed_per_token": fed_per_token(runs),
    }
