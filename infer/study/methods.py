"""SSD, TSD, GSD and Self-SSD against plain decoding (GSD, Tables 1, 2 and 6 to 8).

All take turns on every prompt in the one loop, greedily and by top-p sampling as in Appendix A; every
output of keyed draws is compared with plain decoding, token by token.
"""

from collections.abc import Mapping
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from infer.config import BY_DRAFT_MODEL
from infer.measure.runs import Measured, measure
from infer.study.bench import Bench, Way
from infer.study.rates import (
    DraftedRun,
    acceptance_rate,
    accepted_per_step,
    drafted_per_token,
    drafted_share,
    fed_per_token,
    graph_success,
)

DECODINGS: Mapping[str, dict[str, float]] = {
    "greedy": {},
    "top-p": {"temperature": 0.7, "top_p": 0.7},
}
FIXED, MEASURED, WIDE = "fixed", "measured", "wide"
WIDELY = {
    "theta_prob": 0.1,
    "theta_sib": 0.1,
}  # where the paper's thresholds leave a small model little to merge


class Key(NamedTuple):
    """A row of the table."""

    decoding: str
    method: str
    budget: str | None  # of verified nodes
    verify: str | None


def measure_methods(bench: Bench) -> list[dict[str, Any]]:
    """Table 1: the nodes of the study, and as many as pay by measurement; and with lower thresholds, where
    trees are as large as the paper's.
    """
    ways = dict[Key, Way]()
    for decoding, sampling in DECODINGS.items():
        ways[Key(decoding, "plain", None, None)] = Way(bench.decode("plain", **sampling))
        for budget, nodes in ((FIXED, {}), (MEASURED, {"nodes": None})):
            for method in BY_DRAFT_MODEL:
                way = Way(bench.decode(method, **sampling, **nodes))
                ways[Key(decoding, method, budget, "pick")] = way
            if bench.config.draft.layers != bench.config.self_layers:
                way = Way(bench.decode("ssd", **sampling, **nodes), own=True)
                ways[Key(decoding, "self-ssd", budget, "pick")] = way
    ways[Key("greedy", "tsd", WIDE, "pick")] = Way(bench.decode("tsd", **WIDELY))
    ways[Key("greedy", "gsd", WIDE, "pick")] = Way(bench.decode("gsd", **WIDELY, tau=1, tau_reading="gram"))
    return _rows(bench, ways)


def measure_sampling(bench: Bench) -> list[dict[str, Any]]:
    """Table 2: keyed draws, whose output is plain decoding's, against ratios, whose distribution is."""
    sampling = DECODINGS["top-p"]
    ways = {Key("top-p", "plain", None, None): Way(bench.decode("plain", **sampling))}
    for verify in ("pick", "ratio"):
        for method in BY_DRAFT_MODEL:
            way = Way(bench.decode(method, **sampling, verify=verify))
            ways[Key("top-p", method, FIXED, verify)] = way
    return _rows(bench, ways)


def lossy(rows: list[dict[str, Any]]) -> list[str]:
    """What promised plain decoding's tokens and gave others."""
    return [
        f"{row['decoding']} {row['method']} on {row['prompt_set']}"
        for row in rows
        if row["verify"] != "ratio" and row["identical"] < row["prompts"]
    ]


def _rows(bench: Bench, ways: Mapping[Key, Way]) -> list[dict[str, Any]]:
    decoders, rows = bench.decoders(ways), []
    for name, prompts in bench.prompts.items():
        shares = measure(decoders, bench.members.share(prompts), rounds=bench.config.rounds)
        found = {
            key: Measured([bench.members.gather(runs) for runs in share.rounds])
            for key, share in shares.items()
        }
        for key, measured in found.items():
            plain = found[Key(key.decoding, "plain", None, None)]
            rows.append({"prompt_set": name, **key._asdict(), **_figures(measured, plain)})
    return rows


def _figures(measured: Measured, plain: Measured) -> dict[str, Any]:
    runs = [run for run in chain.from_iterable(measured.rounds) if isinstance(run, DraftedRun)]
    speedups = measured.speedups(plain)
    return {
        "acceptance_rate": acceptance_rate(runs),
        "drafted_share": drafted_share(runs),
        "accepted_per_step": accepted_per_step(runs),
        "drafted_per_token": drafted_per_token(runs),
        "fed_per_token": fed_per_token(runs),
        "graph_success": graph_success(runs),
        "speedup": median(speedups),
        "speedup_range": [min(speedups), max(speedups)],
        "tokens_per_second": measured.median_rate(),
        "identical": sum(a == b for a, b in zip(measured.outputs, plain.outputs, strict=True)),
        "prompts": len(plain.outputs),
        "tokens": sum(len(run.tokens) for run in runs),
    }
