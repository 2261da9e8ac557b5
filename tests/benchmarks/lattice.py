"""SDSAT's candidates as a lattice, or as a tree of fixed shape: tokens per forward by nodes.

    python -m tests.benchmarks.lattice MODEL_DIR PROMPTS.jsonl [KEY] [--count 24] [--new 128]

Counts forwards, takes no times. A forward that makes drafts is one, and one that verifies them is another
(`decode.probes=root`). The trees: a chain; `paper`, the published shape of `decode.tree=paper`; `measured`, the
best fixed shape for this model, from how often each rank was right at each place of other prompts; and the
lattice. In `nodes` stands what a tree had on average: a lattice leaves out what may not be drawn, and the
end of a text cuts every tree. The last line is JSON.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.places import Places
from infer.engine.reading import Request
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.loop import Drafters, Limits, decode
from infer.models.checkpoint import eos_ids, load_adaptive, load_model, load_text
from infer.trees.token_graph import Drafts

WIDTH = 10
SAMPLINGS = {"greedy": Sampling(), **{f"T={t}": Sampling(t, 10, 0.95) for t in (0.2, 1.0)}}


Ranks = Counter[tuple[int, int]]


@dataclass(frozen=True)
class Counting(FixedPolicy):
    """A fixed shape, and how often each rank was right at each place where all before it were."""

    trials: Ranks = field(default_factory=Counter)
    right: Ranks = field(default_factory=Counter)

    def learn(self, places: Places, tokens: Sequence[int], rows: int, seconds: float) -> None:
        node = 0
        for place, token in enumerate(tokens):
            children = places.graph.children[node]
            for rank, child in enumerate(children):
                self.trials[place, rank] += 1
                self.right[place, rank] += places.graph.tokens[child] == token
            node = next((child for child in children if places.graph.tokens[child] == token), -1)
            if node < 0:
                break

    def chances(self) -> list[list[float]]:
        return [
            [self.right[place, rank] / max(1, self.trials[place, rank]) for rank in range(self.width)]
            for place in range(self.k)
        ]


@dataclass(frozen=True)
class Measured(FixedPolicy):
    """The fixed shape of chances by place and rank."""

    chances: list[list[float]] = field(default_factory=list)

    def shape(self, places: Places, left: int) -> tuple[Drafts, Sequence[int], int]:
        for row, chances in zip(places._answers.weights if places._answers else (), self.chances):
            row[:] = [max(chance, 1e-9) for chance in chances[: len(row)]]
        return super().shape(places, left)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("key", nargs="?", default="content")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--nodes", type=int, nargs="+", default=[5, 8, 16, 32, 64])
    args = parser.parse_args()
    torch.set_num_threads(1)
    text, ids = load_text(args.model), load_adaptive(args.model).ids
    lines = [json.loads(line)[args.key] for line in Path(args.prompts).read_text("utf-8").splitlines()]
    prompts = [text.encode(line[: len(line) // 2])[:300] for line in lines if len(line) > 200]
    prompts, others = prompts[: args.count], prompts[-args.count :]
    lm = load_model(args.model, dtype="float32")
    runner, limits = Runner(lm, capacity=300 + args.new, max_rows=80), Limits(args.new, eos_ids(lm))

    def run(policy: FixedPolicy, prompts: list[list[int]], sampling: Sampling) -> dict[str, float]:
        """Tokens per forward, accepted drafts and nodes per verification."""
        new = Drafters(partial(AdaptiveDrafter, ids, policy))
        steps = [s for p in prompts for (s,) in decode(runner, [Request(p)], new, limits, sampling)]
        verified = [step for step in steps if step.drafted]
        return {
            "tokens": sum(len(step.tokens) for step in steps) / len(steps),
            "accepted": sum(step.accepted for step in verified) / len(verified),
            "nodes": sum(step.drafted for step in verified) / len(verified),
        }

    results = {}
    for name, sampling in SAMPLINGS.items():
        counting = Counting(args.k, "root", 4 * args.k, WIDTH)
        run(counting, others, sampling)
        paper = FixedPolicy(args.k, "root", None, WIDTH, "paper")
        results[name] = {
            "chain": run(FixedPolicy(args.k), prompts, sampling),
            f"paper {paper.drafted}": run(paper, prompts, sampling),
        }
        for nodes in args.nodes:
            policies = {
                "measured": Measured(args.k, "root", nodes, WIDTH, chances=counting.chances()),
                "lattice": FixedPolicy(args.k, "root", nodes, WIDTH),
            }
            for kind, policy in policies.items():
                results[name][f"{kind} {nodes}"] = run(policy, prompts, sampling)
        print(f"{name}, {len(prompts)} prompts, k={args.k}\n{'':14} tokens/forward  accepted  nodes")
        for kind, row in results[name].items():
            print(f"{kind:14} {row['tokens']:14.3f} {row['accepted']:9.3f} {row['nodes']:6.1f}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
