r"""GSD's tables (arXiv 2407.16207): a draft model's chains (SSD), trees (TSD), graphs (GSD).

    graph                    tree         accepted y b a c: each the likeliest child, ranks
                                          1 1 1; c stands behind the merged a, and so the
        y                     y           merging succeeded
       / \                   / \
      b   a                 b   a
      |   |                 |   |
      a . c                 a   c
                            |
                            c

A row is a set of prompts decoded by one setting. The draft of a text's last step is not
counted: the end of the text may cut its verification. Speedups are those of part=speed with
speed.decoders=[ssd,tsd,gsd].
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from infer.api import Model, generate
from infer.bench.config import BenchConfig
from infer.bench.harness import Part
from infer.bench.prompts import Prompt
from infer.config import DecodeConfig
from infer.models.checkpoint import ModelDirectory
from infer.trees.token_graph import Outcome

RANKS = 4  # whose shares are reported (Figures 7 and 8)
ABLATED_K = (1, 2, 3, 4, 5, 6)  # Figure 5
ABLATED_TAU = (1, 2, 3, 4, 5)
ABLATED_THETA_PROB = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
ABLATED_THETA_SIB = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
Row = dict[str, Any]


class GsdPart(Part):
    """part=gsd: a record is the row of one setting on one prompt set."""

    title = "gsd"

    def __init__(
        self,
        config: BenchConfig,
        directory: ModelDirectory,
        sets: Mapping[str, Sequence[Prompt]],
    ) -> None:
        super().__init__(replace(config, base=None), directory)
        self._sets = sets
        decode = DecodeConfig(
            "gsd",
            k=config.gsd.k,
            theta_prob=config.gsd.theta_prob,
            theta_sib=config.gsd.theta_sib,
            tau=config.gsd.tau,
            max_new_tokens=config.speed.max_new_tokens,
        )
        self._settings = {
            f"{prompt_set}-{table}-{name.replace(' ', '_')}": (
                prompt_set,
                table,
                name,
                setting,
            )
            for prompt_set in sets
            for table, name, setting in settings(decode)
            if table in config.gsd.parts
        }
        self.names = list(self._settings)
        self.content = [[prompt.ids for prompt in sets[name]] for name in sets]

    def measure(self, name: str) -> Row:
        """Return the row of a setting."""
        prompt_set, table, name, decode = self._settings[name]
        row = {"prompt_set": prompt_set, "part": table, "setting": name}
        return row | measure_setting(self.model, self._sets[prompt_set], decode)

    def result(self, records: Mapping[str, Row], folder: Path) -> dict[str, Any]:
        """Return the rows of the report."""
        return {"rows": list(records.values())}


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The draft of one step.

    `nodes` of its graph are without the root and merged nodes, `levels` were drafted and
    `tokens` emitted. `ranks` are those of the accepted drafts among their siblings, 1 the
    likeliest.
    """

    nodes: int
    levels: int
    tokens: int
    ranks: tuple[int, ...]
    succeeded: bool  # the accepted path continues behind a merged node

    @classmethod
    def of(cls, outcome: Outcome) -> "StepCounts":
        """Count a step. The level of a node is that of its own path, without merging."""
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
    watch = outcomes.append
    steps = list(generate(model, [list(ids)], decode, seeds=[seed], watch=watch))
    return DraftedText(
        tokens=[token for step in steps for token in step.tokens],
        forwards=len(steps),
        accepted=sum(step.accepted for step in steps),
        outcomes=outcomes,
    )


def settings(gsd: DecodeConfig) -> Iterator[tuple[str, str, DecodeConfig]]:
    """Yield table, name and settings of the rows of Tables 1 and 2 and of Figure 5.

    `gsd` has the settings of Appendix A, with the user's changes. Figures 7 and 8 are the ranks
    of the greedy methods and of the ablation of theta_sib.
    """
    tsd = replace(gsd, method="tsd", tau=None)  # without merging
    ssd = replace(tsd, method="ssd", k=None, theta_sib=None)
    for decode in (ssd, tsd, gsd):
        sampled = replace(decode, temperature=0.7, top_p=0.7)
        yield "methods", f"greedy {decode.method}", decode
        yield "methods", f"top-p {decode.method}", sampled
        ratio = replace(sampled, verify="ratio")
        yield "sampling", f"top-p {decode.method} ratio", ratio
    for k in ABLATED_K:
        yield "ablation", f"gsd k={k}", replace(gsd, k=k)
        yield "ablation", f"tsd k={k}", replace(tsd, k=k)
    for tau in ABLATED_TAU:
        yield "ablation", f"gsd tau={tau}", replace(gsd, tau=tau)
    for theta in ABLATED_THETA_PROB:
        yield "ablation", f"gsd theta_prob={theta}", replace(gsd, theta_prob=theta)
    for theta in ABLATED_THETA_SIB:
        yield "ablation", f"gsd theta_sib={theta}", replace(gsd, theta_sib=theta)


def measure_setting(
    model: Model, prompts: Sequence[Prompt], decode: DecodeConfig
) -> Row:
    """Return the figures of a setting; `same` texts are those of plain decoding."""
    plain = DecodeConfig(
        "plain",
        temperature=decode.temperature,
        top_p=decode.top_p,
        max_new_tokens=decode.max_new_tokens,
    )
    texts = []
    same = 0
    for seed, prompt in enumerate(prompts):
        text = decode_prompt(model, prompt.ids, decode, seed)
        same += text.tokens == decode_prompt(model, prompt.ids, plain, seed).tokens
        texts.append(text)
    return {"same": same, "compared": len(texts), **figures(texts)}


def figures(texts: Sequence[DraftedText]) -> Row:
    """Return the figures of texts (Table 1, Figures 5 and 7); none if nothing was drafted.

    acceptance_rate is accepted drafts over drafted levels, averaged over texts, as in the
    authors' code (`matchness`): a level is one forward of the draft model. drafted_share is
    the share of the emitted tokens. drafted_per_token counts nodes of the graphs, without
    merged ones (`drafted_token_num`).
    """
    counts = [[StepCounts.of(outcome) for outcome in text.outcomes] for text in texts]
    steps = list(chain.from_iterable(counts))
    rates = []
    undrafted = 0
    for text, text_steps in zip(texts, counts, strict=True):
        undrafted += text.forwards - 1 - len(text_steps)  # each emits one token
        if levels := sum(step.levels for step in text_steps):
            rates.append(sum(len(step.ranks) for step in text_steps) / levels)
    ranks = Counter(rank for step in steps for rank in step.ranks)
    emitted = sum(step.tokens for step in steps) + undrafted
    accepted = sum(text.accepted for text in texts)
    tokens = sum(len(text.tokens) for text in texts)
    if not steps:
        return {}
    return {
        "acceptance_rate": fmean(rates),
        "drafted_share": accepted / tokens,
        "mean_acceptance_length": 1 + fmean(len(step.ranks) for step in steps),
        "levels": fmean(step.levels for step in steps),
        "drafted_per_token": sum(step.nodes for step in steps) / emitted,
        "graph_success": fmean(step.succeeded for step in steps),
        "rank_shares": [ranks[n] / max(1, ranks.total()) for n in range(1, RANKS + 1)],
    }
