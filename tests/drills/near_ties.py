"""Narrow types: is every token that was decoded with drafts the model's argmax, or a near-tie of it?

    python -m tests.drills.near_ties MODEL_DIR HELD_OUT.jsonl [--count 300] [--new 64] [--dtypes bfloat16]

The text that a decoder made is fed through the model once more in one causal forward (teacher forcing),
which rounds otherwise than forwards of a few rows. A flip is a token that is not that forward's argmax; its
gap is how far below it lies, in logits. `plain` shows what rounding alone does. The last line is JSON.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.auto import AutoPolicy
from infer.engine.reading import Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.loop import Drafter, Drafters, Limits
from infer.models.checkpoint import eos_ids, load_adaptive, load_model, load_text
from infer.trees.tree import Tree
from tests.drills.lossless import BATCH, COSTS, LONGEST, decoded, prompts_of


def gaps(runner: Runner, prompt: list[int], tokens: list[int]) -> list[float]:
    """How far each token lies below the argmax of one causal forward of the whole text."""
    runner.prefill([prompt[:-1]])
    tree = Tree.chain(prompt[-1], tokens[:-1])
    logits = runner.forward([tree], [Request(prompt)], GREEDY).logits[: len(tokens)]
    whole, best = logits.whole(), logits.top(1)[0][:, 0]
    return (best - whole[range(len(tokens)), tokens]).tolist()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    text, ids = load_text(args.model), load_adaptive(args.model).ids
    policies = {
        "two-forward k=5": FixedPolicy(5),
        "one-forward k=3": FixedPolicy(3, "all"),
        "auto": AutoPolicy(COSTS, 8),
    }
    makers = {
        "plain": Drafter,
        **{name: partial(AdaptiveDrafter, ids, policy) for name, policy in policies.items()},
    }
    results = {}
    for dtype in args.dtypes:
        lm = load_model(args.model, dtype=dtype)
        limits = Limits(args.new, eos_ids(lm))
        prompts = prompts_of(text, args.held_out, args.count, lm.config.vocab_size)
        runner = Runner(lm, capacity=LONGEST + args.new, max_rows=64, batch=BATCH)
        for name, new in makers.items():
            requests, found = [Request(prompt) for prompt in prompts], list[float]()
            for start in range(0, len(requests), BATCH):
                batch = requests[start : start + BATCH]
                for one, tokens in zip(batch, decoded(runner, batch, Drafters(new), limits, GREEDY)):
                    found += gaps(runner, list(one.prompt), tokens)
            flips = [gap for gap in found if gap > 0]
            results[f"{dtype} {name}"] = {
                "tokens": len(found),
                "per_thousand": 1000 * len(flips) / len(found),
                "widest": max(flips, default=0.0),
            }
            print(f"{dtype} {name:16}", results[f"{dtype} {name}"], flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
