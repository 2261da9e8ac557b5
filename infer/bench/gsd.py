r"""GSD's figures (arXiv 2407.16207): a draft model's chains (SSD), trees (TSD) and graphs (GSD).

    graph                    tree         accepted y b a c: each the likeliest child, ranks 1 1 1;
                                          c stands behind the merged a, and so the merging succeeded
        y                     y
       / \                   / \
      b   a                 b   a
      |   |                 |   |
      a . c                 a   c
                            |
                            c

Every row is a set of prompts decoded by one setting. The draft of a text's last step is not counted: its
verification may be cut by the text's end. Speedups are those of part=speed with decoders=[ssd,tsd,gsd].
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, pairwise, product
from statistics import fmean, median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infer.api import Model, generate
from infer.config import DecodeConfig
from infer.engine.output import LazyOutput, Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.trees.token_graph import Outcome, TokenGraph
from infer.trees.tree import Tree

CHILDREN = 4  # ranks whose shares are reported (Figures 7 and 8)
ABLATED_K = (1, 2, 3, 4, 5, 6)  # Figure 5
ABLATED_TAU = (1, 2, 3, 4, 5)
ABLATED_THETA_PROB = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
ABLATED_THETA_SIB = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
MERGING_TAU = (1, 2, 3, 4, 5)  # Table 5
MERGING_K = (
    3,
    5,
    16,
)  # at theta_prob >= 1/16 a node has at most 16 children with children: 16 is infinity
NGRAM_SIZES = (1, 2, 3, 4, 5)  # Figure 3
Row = dict[str, str | int | float | list[float] | None]
Prompts = Sequence[Sequence[int]]  # token ids


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The draft of one step: `nodes` of its graph without the root and merged ones, `levels` drafted, `rows`
    fed to the draft model, `tokens` emitted, and the rank of each accepted draft among its siblings (1 is the
    likeliest).
    """

    nodes: int
    levels: int
    rows: int
    tokens: int
    ranks: tuple[int, ...]
    succeeded: bool  # the accepted path goes on behind a merged node

    @classmethod
    def of(cls, outcome: Outcome) -> "StepCounts":
        """Count a step; a node's level is that of its own path, not of a path through merged nodes."""
        graph = outcome.graph
        depths = [0]
        for parent in graph.parents[1:]:
            depths.append(depths[parent] + 1)
        ranks = tuple(
            1 + graph.children[a].index(b) for a, b in pairwise(outcome.accepted)
        )
        return cls(
            nodes=graph.drafted,
            levels=max(depths),
            rows=outcome.rows,
            tokens=len(outcome.tokens),
            ranks=ranks,
            succeeded=outcome.succeeded,
        )


@dataclass(frozen=True)
class DraftedText:
    """A prompt decoded once, with the draft of every step but the last."""

    tokens: list[int]
    forwards: int
    accepted: int
    outcomes: list[Outcome]


def decode_prompt(
    model: Model, ids: Sequence[int], decode: DecodeConfig, seed: int
) -> DraftedText:
    """Decode a prompt and keep its drafts."""
    outcomes: list[Outcome] = []
    steps = list(
        generate(model, [list(ids)], decode, seeds=[seed], watch=outcomes.append)
    )
    tokens = [token for step in steps for token in step.tokens]
    return DraftedText(
        tokens, len(steps), sum(step.accepted for step in steps), outcomes
    )


@dataclass(frozen=True)
class Setting:
    """A row of the paper's tables: what it is called, and how it decodes."""

    part: str
    name: str
    decode: DecodeConfig


def tsd_of(gsd: DecodeConfig) -> DecodeConfig:
    """Return the same settings without merging."""
    return replace(gsd, method="tsd", tau=None)


def settings(gsd: DecodeConfig) -> Iterator[Setting]:
    """Yield the rows of Tables 1 and 2 and of Figure 5; `gsd` is Appendix A's, with the user's changes.

    Figures 7 and 8 are the ranks of the greedy methods and of the ablation of theta_sib.
    """
    tsd = tsd_of(gsd)
    methods = {
        "ssd": replace(tsd, method="ssd", k=None, theta_sib=None),
        "tsd": tsd,
        "gsd": gsd,
    }
    for method, decode in methods.items():
        sampled = replace(decode, temperature=0.7, top_p=0.7)
        yield Setting("methods", f"greedy {method}", decode)
        yield Setting("methods", f"top-p {method}", sampled)
        yield Setting(
            "sampling", f"top-p {method} ratio", replace(sampled, verify="ratio")
        )
    for k in ABLATED_K:
        yield Setting("ablation", f"gsd k={k}", replace(gsd, k=k))
        yield Setting("ablation", f"tsd k={k}", replace(tsd, k=k))
    for tau in ABLATED_TAU:
        yield Setting("ablation", f"gsd tau={tau}", replace(gsd, tau=tau))
    for theta in ABLATED_THETA_PROB:
        yield Setting(
            "ablation", f"gsd theta_prob={theta}", replace(gsd, theta_prob=theta)
        )
    for theta in ABLATED_THETA_SIB:
        yield Setting(
            "ablation", f"gsd theta_sib={theta}", replace(gsd, theta_sib=theta)
        )


def measure_setting(model: Model, prompts: Prompts, setting: Setting) -> Row:
    """Return a row: acceptance, drafts and ranks of the setting, and how many texts are plain decoding's."""
    decode = setting.decode
    plain = DecodeConfig(
        "plain",
        temperature=decode.temperature,
        top_p=decode.top_p,
        max_new_tokens=decode.max_new_tokens,
    )
    texts = [
        decode_prompt(model, ids, decode, seed) for seed, ids in enumerate(prompts)
    ]
    expected = [
        decode_prompt(model, ids, plain, seed).tokens
        for seed, ids in enumerate(prompts)
    ]
    row: Row = {"part": setting.part, "setting": setting.name, "texts": len(texts)}
    row["identical"] = sum(
        text.tokens == tokens for text, tokens in zip(texts, expected, strict=True)
    )
    return row | figures(texts)


def lossy(rows: Sequence[Row]) -> list[str]:
    """Return the settings whose tokens must be plain decoding's (all but the ratios') and are not."""
    return [
        str(row["setting"])
        for row in rows
        if row["part"] != "sampling" and row["identical"] != row["texts"]
    ]


def figures(texts: Sequence[DraftedText]) -> Row:
    """Return the figures of texts (Table 1, Figures 5 and 7); None where nothing was drafted.

    `acceptance_rate` is accepted drafts over drafted levels, averaged over texts, as in the authors' code
    (`matchness`): a level is one forward of the draft model. `drafted_share` is of the emitted tokens. Nodes of
    the graphs are drafted, without merged ones (`drafted_token_num`); rows of the draft model are fed.
    """
    counts = [[StepCounts.of(outcome) for outcome in text.outcomes] for text in texts]
    steps = list(chain.from_iterable(counts))
    rates = []
    undrafted = 0
    for text, of_text in zip(texts, counts, strict=True):
        undrafted += text.forwards - 1 - len(of_text)  # each emits one token
        if levels := sum(step.levels for step in of_text):
            rates.append(sum(len(step.ranks) for step in of_text) / levels)
    ranks = Counter(rank for step in steps for rank in step.ranks)
    emitted = sum(step.tokens for step in steps) + undrafted
    accepted = sum(text.accepted for text in texts)
    return {
        "acceptance_rate": fmean(rates) if rates else None,
        "drafted_share": accepted / sum(len(text.tokens) for text in texts)
        if steps
        else None,
        "mean_acceptance_length": 1
        + sum(len(step.ranks) for step in steps) / len(steps)
        if steps
        else None,
        "levels": sum(step.levels for step in steps) / len(steps) if steps else None,
        "drafted_per_token": sum(step.nodes for step in steps) / emitted
        if steps
        else None,
        "fed_per_token": sum(step.rows for step in steps) / emitted if steps else None,
        "graph_success": fmean(step.succeeded for step in steps) if steps else None,
        "rank_shares": [ranks[n] / ranks.total() for n in range(1, CHILDREN + 1)]
        if ranks
        else None,
    }


def measure_recurrence(model: Model, prompts: Prompts, gsd: DecodeConfig) -> list[Row]:
    """Return the share of the tokens of TSD's trees that stand in recurring n-grams, by n (Figure 3).

    An n-gram recurs where it stands in another branch too, neither above nor below:

        y - a - b - c        n = 1: a, b, c in both branches, not d: 6 of 7 tokens
          ` d - a - b - c    n = 2: a b and b c: 6 of 7
                             n = 4: none
    """
    texts = [
        decode_prompt(model, ids, tsd_of(gsd), seed) for seed, ids in enumerate(prompts)
    ]
    trees = [outcome.graph for text in texts for outcome in text.outcomes]
    tokens = sum(len(tree.tokens) - 1 for tree in trees)
    recur = {n: sum(len(recurring(tree, n)) for tree in trees) for n in NGRAM_SIZES}
    return [
        {
            "part": "recurrence",
            "n": n,
            "share": count / tokens if tokens else None,
            "tokens": tokens,
        }
        for n, count in recur.items()
    ]


def recurring(tree: TokenGraph, n: int) -> set[int]:
    """Return the nodes of n-grams that stand in another branch too; `tree` has no merged nodes."""
    ending = {}
    for node in range(1, len(tree.tokens)):
        path = list(islice(_upwards(tree, node), n))
        if len(path) == n:
            ending[node] = path
    grams = {
        end: tuple(tree.tokens[node] for node in path) for end, path in ending.items()
    }
    count = Counter(grams.values())
    related = Counter(
        grams.keys()
    )  # ends of the same n-gram on the same path, the node itself included
    for end, gram in grams.items():
        for above in islice(_upwards(tree, end), 1, None):
            if grams.get(above) == gram:
                related[end] += 1
                related[above] += 1
    return {
        node
        for end, gram in grams.items()
        if count[gram] > related[end]
        for node in ending[end]
    }


def _upwards(tree: TokenGraph, node: int) -> Iterator[int]:
    while node > 0:
        yield node
        node = tree.parents[node]


@torch.inference_mode()
def measure_merging(model: Model, prompts: Prompts, decode: DecodeConfig) -> Row:
    """Return the cost of merging over all merged nodes of GSD's graphs (Table 5), in nats: with q the draft
    model's distribution behind a path, KL(q(. | own path) || q(. | path of the node merged into)).
    """
    assert model.draft is not None
    values: list[float] = []
    for seed, ids in enumerate(prompts):
        context = list(ids)
        for outcome in decode_prompt(model, ids, decode, seed).outcomes:
            if outcome.graph.merged:
                log_q_nV = node_log_probabilities(
                    model.draft.lm, model.draft.read(context), outcome.graph
                )
                values += divergences(log_q_nV, outcome.graph)
            context += outcome.tokens
    row: Row = {
        "part": "merging",
        "k": decode.k,
        "tau": decode.tau,
        "merged": len(values),
    }
    row["mean_kl"] = fmean(values) if values else None
    row["median_kl"] = median(values) if values else None
    return row


def divergences(log_q_nV: Tensor, graph: TokenGraph) -> list[float]:
    """Return the divergence of each merged node; row n is of what follows node n by its own path."""
    own = log_q_nV[list(graph.merged.keys())]
    into = log_q_nV[list(graph.merged.values())]
    return (own.exp() * (own - into)).sum(-1).tolist()


def node_log_probabilities(
    lm: PreTrainedModel, context: Sequence[int], graph: TokenGraph
) -> Tensor:
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


Task = Callable[[Model, Prompts], list[Row]]


def tasks_of(gsd: DecodeConfig, parts: Sequence[str]) -> dict[str, Task]:
    """Return what is measured by name, a task for each row or table of `parts`."""
    tasks: dict[str, Task] = {}
    for setting in settings(gsd):
        if setting.part in parts:
            tasks[setting.name.replace(" ", "_")] = partial(_measure_one, setting)
    if "merging" in parts:
        for k, tau in product(MERGING_K, MERGING_TAU):
            decode = replace(gsd, k=k, tau=tau)
            tasks[f"merging_k={k}_tau={tau}"] = partial(_measure_merging, decode)
    if "recurrence" in parts:
        tasks["recurrence"] = partial(measure_recurrence, gsd=gsd)
    return tasks


def _measure_one(setting: Setting, model: Model, prompts: Prompts) -> list[Row]:
    return [measure_setting(model, prompts, setting)]


def _measure_merging(decode: DecodeConfig, model: Model, prompts: Prompts) -> list[Row]:
    return [measure_merging(model, prompts, decode)]
