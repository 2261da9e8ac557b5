"""Losslessness in bulk for the model families of GSD: LLaMA, OPT, BLOOM, tiny and random.

    python -m tests.drills.families [--count 1000] [--families llama opt "opt, projected" bloom]

Random prompts in batches of eight unequal lengths; the draft model is the target a little off, so that
many drafts come true. Every method of a draft model, greedy and sampled, in float32, against plain
decoding of each prompt alone. The last line is JSON.
"""

import argparse
import json
import random
import time

import torch

from infer.drafters.budget import FixedBudget
from infer.engine.reading import Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafter, Drafters, Limits
from tests.drills.lossless import decoded
from tests.infer.drafters.test_draft_model import RULES, a_draft_of, drafters_of
from tests.infer.engine.test_families import FAMILIES, tiny

BATCH, LONGEST, NEW = 8, 40, 24


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--families", nargs="+", default=["llama", "opt", "opt, projected", "bloom"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng, results = random.Random(0), {}
    prompts = [[rng.randrange(2, 90) for _ in range(rng.randint(1, LONGEST))] for _ in range(args.count)]
    requests = [Request(prompt, n) for n, prompt in enumerate(prompts)]
    for family in args.families:
        kind, settings = FAMILIES[family]
        lm = tiny(kind, **settings)
        draft, limits = a_draft_of(lm, 0.1), Limits(NEW, [1])
        runner = Runner(lm, capacity=LONGEST + NEW, max_rows=16, batch=BATCH)
        for name, sampling in {"greedy": GREEDY, "nucleus": Sampling(0.8, 10, 0.95)}.items():
            plain = [decoded(runner, [one], Drafters(Drafter), limits, sampling)[0] for one in requests]
            for method in RULES:
                began, drafters, same = time.perf_counter(), drafters_of(draft, method, FixedBudget(12)), 0
                for first in range(0, len(requests), BATCH):
                    found = decoded(runner, requests[first : first + BATCH], drafters, limits, sampling)
                    same += sum(ours == theirs for ours, theirs in zip(found, plain[first:]))
                results[f"{family} {name} {method}"] = same
                seconds = time.perf_counter() - began
                print(f"{family:15} {name:8} {method} {same} of {args.count}, {seconds:.0f} s", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
