"""What merging changes of the draft model's predictions (GSD §5.3, Appendix C, Table 5).

A merged node goes on as the node that it was merged into. By itself it would have gone on by its own
path: with q the draft model's distribution of the next token behind a path,

    KL(q(· | own path) ‖ q(· | path of the node merged into)), in nats.
"""

from collections.abc import Sequence
from itertools import chain
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infer.benchmarks.prompts import TokenPrompt
from infer.engine.reading import LazyReading, Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.study.bench import Bench
from infer.trees.token_graph import TokenGraph
from infer.trees.tree import Tree

TAUS, WIDTHS = (0, 1, 2, 3, 4), (3, 5, 16)


def measure_merging(bench: Bench) -> list[dict[str, Any]]:
    """By out-degree and τ, over all merged nodes of all graphs of GSD.

    τ is the authors' (the preceding tokens that must agree), since Table 5 has τ=0. k=16 stands for the table's
    k=∞: merged nodes are no leaves, and at θ_prob of 1/16 or more a node has at most 16 children that are none.
    """
    rows = []
    for k in WIDTHS:
        for tau in TAUS:
            found = _divergences(bench, k=k, tau=tau)
            mean, middle = (fmean(found), median(found)) if found else (None, None)
            rows.append({"k": k, "tau": tau, "mean_kl": mean, "median_kl": middle, "merged": len(found)})
    return rows


def divergences(log_q_nV: Tensor, graph: TokenGraph) -> list[float]:
    """Of each merged node; row n is of what follows node n by its own path."""
    if not graph.merged:
        return []
    own, into = (log_q_nV[list(nodes)] for nodes in (graph.merged.keys(), graph.merged.values()))
    return (own.exp() * (own - into)).sum(-1).tolist()


@torch.inference_mode()
def _divergences(bench: Bench, *, k: int, tau: int) -> list[float]:
    decode, draft = bench.decode("gsd", k=k, tau=tau, tau_reading="preceding"), bench.draft

    def of_prompt(prompt: TokenPrompt) -> list[float]:
        context, found = list(prompt.ids), list[float]()
        for outcome in bench.outcomes(decode, prompt):
            if outcome.graph.merged:
                found += divergences(log_q(draft.lm, draft.read(context), outcome.graph), outcome.graph)
            context += outcome.tokens
        return found

    return list(chain.from_iterable(bench.each(of_prompt)))


def log_q(lm: PreTrainedModel, context: Sequence[int], graph: TokenGraph) -> Tensor:
    """(n, V) float64 log-probabilities of what follows each node by its own path, behind a context that ends
    with the root.
    """
    n = len(graph.tokens)
    runner = Runner(lm, capacity=len(context), max_rows=n, static=False)
    runner.prefill([context[:-1]])
    tree = Tree((context[-1], *graph.tokens[1:]), tuple(graph.parents), n)
    reading = runner.forward([tree], [Request(context)], GREEDY)
    assert isinstance(reading, LazyReading)
    return reading.logits[:n].whole().double().log_softmax(-1)
