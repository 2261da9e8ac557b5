"""The measurements of the GSD paper's tables and figures, a function each.

`measure_methods`, `measure_sampling` (Tables 1, 2 and 6 to 8): SSD, TSD, GSD and Self-SSD take turns with plain
decoding on every prompt in the one loop, greedily and by top-p sampling as in Appendix A; every output of keyed
draws is compared with plain decoding, token by token.

`measure_time` (Table 3): draft is the drafter's `propose`, verification lasts from the model's forward until
the path is chosen, others is what is left of the step. Medians over all steps but a text's first, which waits
for the prompt's forward, and its last, after which nothing is learned.

`measure_ablation`, `measure_ranks` (Figures 5 and 8): one setting at a time, all others as in Appendix A.

`measure_recurrence` (Figure 3): an n-gram is n drafts, each behind the one before it. It recurs where it stands
in another branch too, neither above nor below: what repeats along one path is no other hypothesis.

    y - a - b - c        n = 1: a, b, c in both branches, not d: 6 of 7 tokens
      ` d - a - b - c    n = 2: a b and b c: 6 of 7
                         n = 4: none

`measure_merging` (Table 5): a merged node goes on as the node that it was merged into. By itself it would have
gone on by its own path: with q the draft model's distribution of the next token behind a path,

    KL(q(· | own path) ‖ q(· | path of the node merged into)), in nats.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infer.benchmarks.prompts import TokenPrompt
from infer.config import BY_DRAFT_MODEL
from infer.engine.output import LazyOutput, Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.measure.runs import Measured, measure
from infer.speed.profile import Spent, timed
from infer.study.models import DraftedRun, StudyDecoder, StudyModels, figures, rank_shares
from infer.trees.token_graph import TokenGraph
from infer.trees.tree import Tree

DECODINGS: Mapping[str, dict[str, float]] = {
    "greedy": {},
    "top-p": {"temperature": 0.7, "top_p": 0.7},
}
FIXED, MEASURED, WIDE = "fixed", "measured", "wide"
WIDELY = {"theta_prob": 0.1, "theta_sib": 0.1}  # the paper's thresholds leave a small model little to merge


class MethodKey(NamedTuple):
    """A row of the table."""

    decoding: str
    method: str
    budget: str | None  # of verified nodes
    verify: str | None


def measure_methods(models: StudyModels) -> list[dict[str, Any]]:
    """Measure Table 1: the nodes of the study, and as many as pay by measurement; and with lower thresholds,
    where trees are as large as the paper's.
    """
    specs = dict[MethodKey, StudyDecoder]()
    for decoding, sampling in DECODINGS.items():
        specs[MethodKey(decoding, "plain", None, None)] = StudyDecoder(models.decode("plain", **sampling))
        for budget, nodes in ((FIXED, {}), (MEASURED, {"nodes": None})):
            for method in BY_DRAFT_MODEL:
                key = MethodKey(decoding, method, budget, "pick")
                specs[key] = StudyDecoder(models.decode(method, **sampling, **nodes))
            if models.config.draft.layers != models.config.self_layers:
                spec = StudyDecoder(models.decode("ssd", **sampling, **nodes), own=True)
                specs[MethodKey(decoding, "self-ssd", budget, "pick")] = spec
    specs[MethodKey("greedy", "tsd", WIDE, "pick")] = StudyDecoder(models.decode("tsd", **WIDELY))
    specs[MethodKey("greedy", "gsd", WIDE, "pick")] = StudyDecoder(
        models.decode("gsd", **WIDELY, tau=1, tau_reading="gram")
    )
    return _rows(models, specs)


def measure_sampling(models: StudyModels) -> list[dict[str, Any]]:
    """Measure Table 2: keyed draws, whose output is plain decoding's, against ratios, whose distribution is."""
    sampling = DECODINGS["top-p"]
    specs = {MethodKey("top-p", "plain", None, None): StudyDecoder(models.decode("plain", **sampling))}
    for verify in ("pick", "ratio"):
        for method in BY_DRAFT_MODEL:
            spec = StudyDecoder(models.decode(method, **sampling, verify=verify))
            specs[MethodKey("top-p", method, FIXED, verify)] = spec
    return _rows(models, specs)


def lossy(rows: list[dict[str, Any]]) -> list[str]:
    """Return what promised plain decoding's tokens and gave others."""
    return [
        f"{row['decoding']} {row['method']} on {row['prompt_set']}"
        for row in rows
        if row["verify"] != "ratio" and row["identical"] < row["prompts"]
    ]


def _rows(models: StudyModels, specs: Mapping[MethodKey, StudyDecoder]) -> list[dict[str, Any]]:
    decoders, rows = models.decoders(specs), []
    for name, prompts in models.prompts.items():
        shares = measure(decoders, models.workers.share(prompts), rounds=models.config.rounds)
        values = {
            key: Measured([models.workers.gather(runs) for runs in share.rounds])
            for key, share in shares.items()
        }
        for key, measured in values.items():
            plain = values[MethodKey(key.decoding, "plain", None, None)]
            runs = [run for run in chain.from_iterable(measured.rounds) if isinstance(run, DraftedRun)]
            speedups = measured.speedups(plain)
            row = {
                "speedup": median(speedups),
                "speedup_range": [min(speedups), max(speedups)],
                "tokens_per_second": median(measured.tokens_per_second),
                "identical": sum(a == b for a, b in zip(measured.outputs, plain.outputs, strict=True)),
                "prompts": len(plain.outputs),
                "tokens": sum(len(run.tokens) for run in runs),
            }
            rows.append({"prompt_set": name, **key._asdict(), **figures(runs), **row})
    return rows


SETTINGS = (("ssd", 1), ("tsd", 2), ("gsd", 2), ("tsd", 4), ("gsd", 4))
PARTS = ("draft", "verification", "others")


def measure_time(models: StudyModels) -> list[dict[str, Any]]:
    """Return a row for each of Table 3's."""
    drafters = {
        (method, k): models.drafters(StudyDecoder(models.decode(method, k=k))) for method, k in SETTINGS
    }
    runner = models.runner(drafters.values())
    share = models.workers.share(models.all_prompts)
    spent_by = {setting: [list[Spent]() for _ in share] for setting in SETTINGS}
    for round_ in range(1 + models.config.rounds):  # the first warms up
        for index, prompt in enumerate(share):
            for setting, drafter in drafters.items():
                steps = timed(runner, drafter, Request(prompt.ids), models.limits())
                drafted = [spent for step, spent in steps[1:-1] if step.drafted]
                spent_by[setting][index] += drafted if round_ else []
    gathered = {setting: models.workers.gather(spent) for setting, spent in spent_by.items()}
    spent_by_setting = {setting: list(chain.from_iterable(spent)) for setting, spent in gathered.items()}
    return [
        {"method": method, "k": k, "steps": len(rows), **dict.fromkeys(PARTS)}
        | dict(zip(PARTS, map(median, zip(*rows))))
        for (method, k), rows in spent_by_setting.items()
    ]


VALUES: dict[str, tuple[float, ...]] = {
    "k": (1, 2, 3, 4, 5, 6),
    "tau": (0, 1, 2, 3, 4),
    "theta_prob": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
    "theta_sib": (0.0, 0.1, 0.3, 0.5, 0.7, 0.9),
}
ABLATED = ("acceptance_rate", "drafted_share", "drafted_per_token", "fed_per_token")
RANKED = (0.0, 0.1, 0.3, 0.5, 0.7)  # θ_sib of Figure 8
CHILDREN = 4


def measure_ablation(models: StudyModels) -> list[dict[str, Any]]:
    """Measure GSD against each setting, and TSD against k."""
    rows = []
    for setting, values in VALUES.items():
        for method in ("gsd", "tsd") if setting == "k" else ("gsd",):
            for value in values:
                if setting == "tau" and value == 0 and models.config.tau_reading == "gram":
                    continue
                rates = figures(models.run(models.decode(method, **{setting: value})))
                row = {"setting": setting, "value": value, "method": method}
                rows.append(row | {name: rates[name] for name in ABLATED})
    return rows


def measure_ranks(models: StudyModels) -> list[dict[str, Any]]:
    """Count which child was accepted, by method and by θ_sib of GSD (Figures 7 and 8)."""
    specs = {("method", method): models.decode(method) for method in ("ssd", "tsd", "gsd")}
    specs |= {("theta_sib", str(value)): models.decode("gsd", theta_sib=value) for value in RANKED}
    rows = []
    for (by, value), decode in specs.items():
        ranks = [rank for run in models.run(decode) for step in run.counts for rank in step.ranks]
        rows.append({"by": by, "value": value, "accepted": len(ranks), "shares": rank_shares(ranks, CHILDREN)})
    return rows


LENGTHS = (1, 2, 3, 4, 5)


def measure_recurrence(models: StudyModels) -> list[dict[str, Any]]:
    """Measure recurrence by n, over the trees of all prompts: TSD's by the paper's settings."""
    decode = models.decode("tsd")

    def counts(prompt: TokenPrompt) -> list[tuple[int, dict[int, int]]]:
        """Return the tokens of each tree, and by n those that recur."""
        graphs = [outcome.graph for outcome in models.outcomes(decode, prompt)]
        return [(len(graph.tokens) - 1, {n: len(recurring(graph, n)) for n in LENGTHS}) for graph in graphs]

    trees = list(chain.from_iterable(models.each(counts)))
    tokens = sum(size for size, _ in trees)
    recur = {n: sum(by_length[n] for _, by_length in trees) for n in LENGTHS}
    return [
        {"n": n, "share": recur[n] / tokens if tokens else None, "tokens": tokens, "trees": len(trees)}
        for n in LENGTHS
    ]


def recurring(tree: TokenGraph, n: int) -> set[int]:
    """Return the nodes of n-grams that stand in another branch too; `tree` has no merged nodes."""
    paths = {node: _ending(tree, node, n) for node in range(1, len(tree.tokens))}
    grams = {end: tuple(tree.tokens[node] for node in path) for end, path in paths.items() if path}
    count, own = Counter(grams.values()), Counter(grams.keys())  # own: those of its path, above and below
    for end, gram in grams.items():
        for above in islice(_upwards(tree, end), 1, None):
            if grams.get(above) == gram:
                own[end] += 1
                own[above] += 1
    return {node for end, gram in grams.items() if count[gram] > own[end] for node in paths[end]}


def _ending(tree: TokenGraph, node: int, n: int) -> list[int]:
    """Return the n nodes of the path that ends there; none where it is shorter."""
    path = list(islice(_upwards(tree, node), n))
    return path if len(path) == n else []


def _upwards(tree: TokenGraph, node: int) -> Iterator[int]:
    while node > 0:
        yield node
        node = tree.parents[node]


TAUS, WIDTHS = (0, 1, 2, 3, 4), (3, 5, 16)


def measure_merging(models: StudyModels) -> list[dict[str, Any]]:
    """Measure merging by out-degree and τ, over all merged nodes of all graphs of GSD.

    τ is the authors' (the preceding tokens that must agree), since Table 5 has τ=0. k=16 stands for the table's
    k=∞: merged nodes are no leaves, and at θ_prob of 1/16 or more a node has at most 16 children that are none.
    """
    rows = []
    for k in WIDTHS:
        for tau in TAUS:
            values = _divergences(models, k=k, tau=tau)
            mean, middle = (fmean(values), median(values)) if values else (None, None)
            rows.append({"k": k, "tau": tau, "mean_kl": mean, "median_kl": middle, "merged": len(values)})
    return rows


def divergences(log_q_nV: Tensor, graph: TokenGraph) -> list[float]:
    """Return the divergences of each merged node; row n is of what follows node n by its own path."""
    if not graph.merged:
        return []
    own, into = (log_q_nV[list(nodes)] for nodes in (graph.merged.keys(), graph.merged.values()))
    return (own.exp() * (own - into)).sum(-1).tolist()


@torch.inference_mode()
def _divergences(models: StudyModels, *, k: int, tau: int) -> list[float]:
    decode, draft = models.decode("gsd", k=k, tau=tau, tau_reading="preceding"), models.draft

    def of_prompt(prompt: TokenPrompt) -> list[float]:
        context, values = list(prompt.ids), list[float]()
        for outcome in models.outcomes(decode, prompt):
            if outcome.graph.merged:
                values += divergences(log_q(draft.lm, draft.read(context), outcome.graph), outcome.graph)
            context += outcome.tokens
        return values

    return list(chain.from_iterable(models.each(of_prompt)))


def log_q(lm: PreTrainedModel, context: Sequence[int], graph: TokenGraph) -> Tensor:
    """Return (n, V) float64 log-probabilities of what follows each node by its own path, behind a context that
    ends with the root.
    """
    n = len(graph.tokens)
    runner = Runner(lm, capacity=len(context), max_rows=n, static=False)
    runner.prefill([context[:-1]])
    tree = Tree((context[-1], *graph.tokens[1:]), tuple(graph.parents), n)
    output = runner.forward([tree], [Request(context)], GREEDY)
    assert isinstance(output, LazyOutput)
    return output.logits[:n].whole().double().log_softmax(-1)


MEASUREMENTS: dict[str, Callable[[StudyModels], list[dict[str, Any]]]] = {
    "methods": measure_methods,
    "sampling": measure_sampling,
    "time": measure_time,
    "recurrence": measure_recurrence,
    "ablation": measure_ablation,
    "merging": measure_merging,
    "ranks": measure_ranks,
}
