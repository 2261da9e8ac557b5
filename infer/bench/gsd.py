r"""GSD's tables (arXiv 2407.16207): a draft model's chains (SSD), trees (TSD), graphs (GSD).

    graph                    tree         accepted y b a c: each the likeliest child, ranks
                                          1 1 1; c follows the merged a, so the merging
        y                     y           succeeded
       / \                   / \
      b   a                 b   a
      |   |                 |   |
      a . c                 a   c
                            |
                            c

The numbers of levels and nodes are fixed, as in the paper, so that the counts of a run can be
repeated. Every text is paired with a text of plain decoding, in the order of runs.blocks. The
last step of a text counts the drafts that were accepted up to the text's end.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from infer.api import Model, generate
from infer.bench.config import BenchConfig, GsdConfig
from infer.bench.harness import Part, Record, WorkerGroup
from infer.bench.names import PLAIN, RANKS, TIMES
from infer.bench.prompts import Prompt
from infer.bench.runs import blocks, seed_of
from infer.bench.timing import TextTimes, speedup, speedup_interval
from infer.config import DecodeConfig
from infer.engine.runner import duration
from infer.models.checkpoint import ModelDirectory
from infer.trees.token_graph import Outcome, TokenGraph

NGRAMS = 5  # the longest n-grams of Figure 3
ABLATED: Mapping[str, Sequence[Any]] = {  # Figure 5
    "k": (1, 2, 3, 4, 5, 6),
    "tau": (1, 2, 3, 4, 5),
    "theta_prob": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
    "theta_sib": (0.0, 0.1, 0.3, 0.5, 0.7, 0.9),
}


class GsdPart(Part):
    """part=gsd. A record is a prompt that is decoded with each setting of a table."""

    title = "gsd"

    def __init__(
        self,
        config: BenchConfig,
        directory: ModelDirectory,
        sets: Mapping[str, Sequence[Prompt]],
    ) -> None:
        super().__init__(replace(config, base=None), directory, sets)
        self._tables = tables(config.gsd)
        self.tasks = {
            f"{name}-{table}-{index:05}": (name, table, index)
            for name, prompts in sets.items()
            for table in config.gsd.parts
            for index in range(len(prompts))
        }

    def load(self, workers: WorkerGroup) -> None:
        """Load the models, and decode the longest prompt once by each method."""
        super().load(workers)
        prompts = [prompt for prompts in self.sets.values() for prompt in prompts]
        longest = max(prompts, key=lambda prompt: len(prompt.ids))
        plain = DecodeConfig(PLAIN, max_new_tokens=self.config.gsd.max_new_tokens)
        for decode in (plain, *self.config.gsd.decoders(plain).values()):
            decode_prompt(self.model, longest.ids, decode, 0)

    def measure(self, task: tuple[str, str, int]) -> Record:
        """Decode a prompt with all settings of a table; return the counts and times."""
        prompt_set, table, index = task
        prompt = self.sets[prompt_set][index]
        seed = seed_of(prompt, self.config.seed)
        runs = {}
        for decoders in self._tables[table]:
            names = [name for name in decoders if name != PLAIN]
            for block in blocks(names, PLAIN, index):
                texts = {
                    name: decode_prompt(self.model, prompt.ids, decoders[name], seed)
                    for name in block
                }
                plain = texts.pop(PLAIN)
                for name, text in texts.items():
                    runs[name] = record(text, plain, decoders[name])
        order = [name for decoders in self._tables[table] for name in decoders]
        runs = {name: runs[name] for name in order if name != PLAIN}
        return {"prompt_set": prompt_set, "part": table, "runs": runs}

    def result(self, records: Mapping[str, Record], folder: Path) -> dict[str, Any]:
        """Return the rows of the report."""
        groups: dict[tuple[str, str, str], list[Record]] = {}
        for each in records.values():
            for name, run in each["runs"].items():
                key = (each["prompt_set"], each["part"], name)
                groups.setdefault(key, []).append(run)
        rows = []
        for (prompt_set, table, name), runs in groups.items():
            columns = {"prompt_set": prompt_set, "part": table, "setting": name}
            rows.append(columns | figures(runs))
        return {"rows": rows}


@dataclass(frozen=True)
class DraftedText:
    """A prompt that was decoded once, with its drafts and the times of its steps.

    `times` are the seconds of draft, verification and rest for each step except the first,
    which reads the prompt, and the last.
    """

    tokens: list[int]
    seconds: float
    outcomes: list[Outcome]
    times: list[tuple[float, float, float]] = field(default_factory=list)


def decode_prompt(
    model: Model, ids: Sequence[int], decode: DecodeConfig, seed: int
) -> DraftedText:
    """Decode a prompt; return its text, its drafts and the times of its steps."""
    outcomes: list[Outcome] = []
    tokens: list[int] = []
    last: list[int] = []
    times = []
    began = time.perf_counter()
    before = 0.0
    drafted = 0
    watch = outcomes.append
    for step in generate(model, [list(ids)], decode, seeds=[seed], watch=watch):
        now = time.perf_counter()
        tokens += step.tokens
        last = step.tokens
        if before and len(outcomes) > drafted:
            parts = (outcomes[-1].draft_seconds, outcomes[-1].verification_seconds)
            times.append((*parts, now - before - sum(parts)))
        before = now
        drafted = len(outcomes)
    seconds = duration(began, before)
    if len(outcomes) > drafted:
        outcomes[-1] = completed(outcomes[-1], last)
    return DraftedText(tokens, seconds, outcomes, times)


def completed(outcome: Outcome, tokens: Sequence[int]) -> Outcome:
    """Return the outcome of a text's last step with its path, given the emitted tokens."""
    drafts = outcome.drafts
    path = [0]
    for token in tokens:
        children = (
            node for node, parent in enumerate(drafts.parents) if parent == path[-1]
        )
        child = next((node for node in children if drafts.tokens[node] == token), None)
        if child is None:
            break
        path.append(child)
    return replace(outcome, path=path, tokens=list(tokens))


def tables(gsd: GsdConfig) -> dict[str, list[dict[str, DecodeConfig]]]:
    """Return the decoders of each table by name, in groups that each have a plain decoder.

    methods: Tables 1, 3 and 6 to 8, Figure 7. sampling: Tables 2 and 9, verified by ratio.
    ablation: Figure 5, and Figure 8 from the rows of theta_sib.
    """
    greedy = DecodeConfig(PLAIN, max_new_tokens=gsd.max_new_tokens)
    nucleus = replace(greedy, temperature=0.7, top_p=0.7)
    methods = {
        f"greedy {name}": decode for name, decode in gsd.decoders(greedy).items()
    }
    sampled = {
        f"top-p {name}": decode for name, decode in gsd.decoders(nucleus).items()
    }
    by_ratio = {
        f"{name} ratio": replace(decode, verify="ratio")
        for name, decode in sampled.items()
    }
    ablated = {
        f"{method} {name}={value}": replace(gsd, **{name: value}).decoders(greedy)[
            method
        ]
        for name, values in ABLATED.items()
        for value in values
        for method in (("gsd", "tsd") if name == "k" else ("gsd",))
    }
    return {
        "methods": [{PLAIN: greedy, **methods}, {PLAIN: nucleus, **sampled}],
        "sampling": [{PLAIN: nucleus, **by_ratio}],
        "ablation": [{PLAIN: greedy, **ablated}],
    }


def record(text: DraftedText, plain: DraftedText, decode: DecodeConfig) -> Record:
    """Return the counts and times of a text and of its pair by plain decoding, as JSON."""
    graphs = [outcome.graph for outcome in text.outcomes]
    ranks = [rank for outcome in text.outcomes for rank in ranks_of(outcome)]
    trees = graphs if decode.method == "tsd" else []
    exact = decode.verify == "pick"
    return {
        "seconds": text.seconds,
        "tokens": len(text.tokens),
        "plain": {"seconds": plain.seconds, "tokens": len(plain.tokens)},
        "steps": len(text.outcomes),  # only steps with a draft
        "drafted": sum(graph.drafted for graph in graphs),
        "levels": sum(map(levels_of, text.outcomes)),
        "accepted": len(ranks),
        "ranks": [Counter(ranks)[rank] for rank in range(1, 1 + max(ranks, default=0))],
        "successes": sum(outcome.succeeded for outcome in text.outcomes),
        "recurring": list(map(recurring, trees)),
        "same": text.tokens == plain.tokens if exact else None,
        "times": [[1e3 * seconds for seconds in parts] for parts in text.times],
    }


def figures(runs: Sequence[Record]) -> Record:
    """Return the figures of one setting (Tables 1 and 3, Figures 3, 5 and 7).

    acceptance_rate is accepted drafts / drafted levels, averaged over texts, as in the authors'
    code (`matchness`). A level is one forward of the draft model. drafted_tokens is the mean
    number per text of nodes in the graphs, without roots and merged nodes. drafted_share is the
    share of drafts in the emitted tokens. The times are medians over steps.
    """
    total = {
        name: sum(run[name] for run in runs)
        for name in ("tokens", "steps", "drafted", "levels", "accepted", "successes")
    }
    plain = TextTimes.of_whole_texts([[run["plain"]["seconds"]] for run in runs])
    own = TextTimes.of_whole_texts([[run["seconds"]] for run in runs])
    scale = [run["plain"]["tokens"] / run["tokens"] for run in runs]
    rates = [run["accepted"] / run["levels"] for run in runs if run["levels"]]
    times = [parts for run in runs for parts in run["times"]]
    ranks = [
        sum(run["ranks"][rank] for run in runs if rank < len(run["ranks"]))
        for rank in range(RANKS)
    ]
    steps = max(1, total["steps"])
    trees = [shares for run in runs for shares in run["recurring"]]
    compared = [run["same"] for run in runs if run["same"] is not None]
    return {
        "acceptance_rate": fmean(rates) if rates else None,
        "drafted_tokens": total["drafted"] / len(runs),
        "graph_success": total["successes"] / steps,
        "mean_acceptance_length": 1 + total["accepted"] / steps,
        "speedup": float(speedup(plain, own, scale)[0]),
        "speedup_interval": speedup_interval(plain, own, scale),
        **{
            name: median(column) if times else None
            for name, column in zip(TIMES, zip(*times) if times else [()] * len(TIMES))
        },
        "drafted_share": total["accepted"] / total["tokens"],
        "levels": total["levels"] / steps,
        "rank_shares": [count / max(1, total["accepted"]) for count in ranks],
        "recurring": [fmean(shares) for shares in zip(*trees)],
        "same": sum(compared),
        "compared": len(compared),
    }


def levels_of(outcome: Outcome) -> int:
    """Return the number of levels of a draft. Merging does not change the level of a node."""
    depths = [0]
    for parent in outcome.graph.parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def ranks_of(outcome: Outcome) -> list[int]:
    """Return the ranks of the accepted drafts among their siblings; 1 is the likeliest."""
    children = outcome.graph.children
    return [1 + children[a].index(b) for a, b in pairwise(outcome.accepted)]


def recurring(graph: TokenGraph) -> list[float]:
    """Return the share of a tree's tokens that are in an n-gram of two branches, for n = 1 to 5.

    The root does not count as a token (Figure 3).
    """
    paths: list[list[int]] = [[]]  # nodes from the first level on
    for node in range(1, len(graph.tokens)):
        paths.append([*paths[graph.parents[node]], node])
    shares = []
    for n in range(1, 1 + NGRAMS):
        ends: dict[tuple[int, ...], set[int]] = {}
        for path in paths:
            if len(path) >= n:
                gram = tuple(graph.tokens[node] for node in path[-n:])
                ends.setdefault(gram, set()).add(path[-1])
        again: set[int] = set()
        for nodes in ends.values():
            # A repetition within one branch does not count.
            pairs = [(a, b) for b in nodes for a in paths[b][:-1] if a in nodes]
            kin = Counter(chain.from_iterable(pairs))
            for node in nodes:
                if len(nodes) - 1 > kin[node]:
                    again.update(paths[node][-n:])
        shares.append(len(again) / (len(graph.tokens) - 1))
    return shares
