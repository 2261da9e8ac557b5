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
from itertools import pairwise
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
ABLATED: Mapping[str, Sequence[Any]] = {  # Figure 5
    "k": (1, 2, 3, 4, 5, 6),
    "tau": (1, 2, 3, 4, 5),
    "theta_prob": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
    "theta_sib": (0.0, 0.1, 0.3, 0.5, 0.7, 0.9),
}
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
        super().__init__(replace(config, base=None), directory, sets)
        decode = DecodeConfig(
            "gsd",
            k=config.gsd.k,
            theta_prob=config.gsd.theta_prob,
            theta_sib=config.gsd.theta_sib,
            tau=config.gsd.tau,
            max_new_tokens=config.speed.max_new_tokens,
        )
        self.tasks = {
            f"{prompt_set}-{task[0]}-{task[1].replace(' ', '_')}": (prompt_set, *task)
            for prompt_set in sets
            for task in settings(decode)
            if task[0] in config.gsd.parts
        }

    def measure(self, task: tuple[str, str, str, DecodeConfig]) -> Row:
        """Return the row of a setting."""
        prompt_set, table, name, decode = task
        row = {"prompt_set": prompt_set, "part": table, "setting": name}
        texts = [
            decode_prompt(self.model, prompt.ids, decode, seed)
            for seed, prompt in enumerate(self.sets[prompt_set])
        ]
        return row | figures(texts)

    def result(self, records: Mapping[str, Row], folder: Path) -> dict[str, Any]:
        """Return the rows of the report."""
        return {"rows": list(records.values())}


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
    for name, values in ABLATED.items():
        for value in values:
            for decode in (gsd, tsd) if name == "k" else (gsd,):
                changed = replace(decode, **{name: value})
                yield "ablation", f"{decode.method} {name}={value}", changed


def figures(texts: Sequence[DraftedText]) -> Row:
    """Return the figures of texts (Table 1, Figures 5 and 7); none if nothing was drafted.

    acceptance_rate is accepted drafts over drafted levels, averaged over texts, as in the
    authors' code (`matchness`): a level is one forward of the draft model. drafted_share is
    the share of the emitted tokens. drafted_per_token counts nodes of the graphs, without
    merged ones (`drafted_token_num`).
    """
    outcomes = [outcome for text in texts for outcome in text.outcomes]
    if not outcomes:
        return {}
    rates = []
    undrafted = 0
    for text in texts:
        undrafted += text.forwards - 1 - len(text.outcomes)  # each emits one token
        if levels := sum(levels_of(outcome) for outcome in text.outcomes):
            rates.append(sum(len(ranks_of(o)) for o in text.outcomes) / levels)
    ranks = Counter(rank for outcome in outcomes for rank in ranks_of(outcome))
    emitted = sum(len(outcome.tokens) for outcome in outcomes) + undrafted
    shares = [ranks[rank] / max(1, ranks.total()) for rank in range(1, RANKS + 1)]
    tokens = sum(len(text.tokens) for text in texts)
    return {
        "acceptance_rate": fmean(rates),
        "drafted_share": sum(text.accepted for text in texts) / tokens,
        "mean_acceptance_length": 1 + ranks.total() / len(outcomes),
        "levels": fmean(map(levels_of, outcomes)),
        "drafted_per_token": sum(o.graph.drafted for o in outcomes) / emitted,
        "graph_success": fmean(outcome.succeeded for outcome in outcomes),
        "rank_shares": shares,
    }


def levels_of(outcome: Outcome) -> int:
    """Return the levels of a draft. A node's is that of its own path, without merging."""
    depths = [0]
    for parent in outcome.graph.parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def ranks_of(outcome: Outcome) -> list[int]:
    """Return the ranks of the accepted drafts among their siblings, 1 the likeliest."""
    children = outcome.graph.children
    return [1 + children[a].index(b) for a, b in pairwise(outcome.accepted)]
