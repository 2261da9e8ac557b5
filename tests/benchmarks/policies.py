"""Where the probes should hang on this device: plain, prompt lookup, two-forward, one-forward, `auto`.

    python -m tests.benchmarks.policies MODEL_DIR PROMPTS.jsonl [KEY] [--prompts 12] [--new 128] [--base DIR]
                                        [--dtypes bfloat16 float32] [--rounds 5] [--temperature 0]

Greedy, or sampled with top_k 10 and top_p 0.95; one thread. All decoders take turns on every prompt;
a row's figures are medians over rounds of the ratio in that round: to plain decoding, and to the
paper's two forwards at their best k. `--base` names a model that never saw adaptive tokens, on which
drafting cannot pay: `auto` has to fall back there. The last line is JSON.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path

import torch

from infer.benchmarks.prompts import TokenPrompt
from infer.checkpoint import eos_ids, load_adaptive, load_model, load_text
from infer.costs import measure_costs
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.auto import AutoPolicy
from infer.drafters.plain import PlainDrafter
from infer.drafters.prompt_lookup import PromptLookupDrafter
from infer.loop import Each, Limits
from infer.measure import Measured, loop_decoder, measure
from infer.pick import Sampling
from infer.runner import Runner


def compare(
    folder: str, ids: tuple[int, ...], prompts: list[TokenPrompt], dtype: str, args: argparse.Namespace
) -> dict[str, Measured]:
    """All decoders of one model."""
    lm = load_model(folder, dtype=dtype)
    capacity = max(len(prompt.ids) for prompt in prompts) + args.new
    costs = measure_costs(lm, batch=1, context=min(capacity, 1024))
    print(f"{dtype}: L(q) in ms", {q: round(ms, 2) for q, ms in zip(costs.rows, costs.ms)})
    auto = AutoPolicy(costs, 8)
    fixed = {
        **{f"two-forward k={k}": FixedPolicy(k) for k in (1, 2, 3, 5)},
        **{f"one-forward k={k}": FixedPolicy(k, "all") for k in (1, 2, 3)},
        "two sites k=3": FixedPolicy(3, 2),
        "lattice of 8, k=3": FixedPolicy(3, nodes=8, width=4, graph=True),
    }
    makers = {
        "plain": PlainDrafter,
        "prompt lookup k=5": partial(PromptLookupDrafter, 5),
        **{name: partial(AdaptiveDrafter, ids, policy) for name, policy in fixed.items()},
        "auto": partial(AdaptiveDrafter, ids, auto),
    }
    if args.only:
        wanted = ("plain", *args.only)
        makers = {name: new for name, new in makers.items() if name.startswith(wanted)}
    sampling = Sampling(args.temperature, 10, 0.95) if args.temperature else Sampling()
    runner = Runner(lm, capacity=capacity, max_rows=64)
    limits = Limits(args.new, eos_ids(lm))
    decoders = {name: loop_decoder(runner, Each(new), limits, sampling) for name, new in makers.items()}
    return measure(decoders, prompts, rounds=args.rounds)


def table(found: dict[str, Measured], title: str) -> dict[str, dict[str, float]]:
    """Print and return medians."""
    plain = found["plain"]
    papers = [one for name, one in found.items() if name.startswith("two-forward")]
    paper = max(papers or [plain], key=Measured.median_rate)
    rows = {}
    print(
        f"{title}\n{'':20} {'tokens/s':>9} {'x plain':>8} {'x two-forward':>14} {'tok/forward':>12} {'same':>8}"
    )
    for name, one in found.items():
        same = sum(a == b for a, b in zip(one.outputs, plain.outputs))
        rows[name] = {
            "tokens_per_second": one.median_rate(),
            "plain": statistics.median(one.speedups(plain)),
            "paper": statistics.median(one.speedups(paper)),
            "tokens_per_forward": one.tokens_per_forward,
        }
        row = rows[name]
        print(
            f"{name:20} {row['tokens_per_second']:9.0f} {row['plain']:8.2f} {row['paper']:14.2f} "
            f"{row['tokens_per_forward']:12.2f} {same:4}/{len(plain.outputs)}"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("key", nargs="?", default="content")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--base")
    parser.add_argument("--only", nargs="+", help="decoders whose name begins so, beside plain")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text, ids = load_text(args.model), load_adaptive(args.model).ids
    lines = [json.loads(line)[args.key] for line in Path(args.prompts).read_text("utf-8").splitlines()]
    halves = [line[: len(line) // 2] for line in lines if len(line) > 200][: args.count]
    prompts = [
        TokenPrompt(str(index), tuple(text.encode(half)[:300]), frozenset(), half, "")
        for index, half in enumerate(halves)
    ]
    results = {}
    for dtype in args.dtypes:
        for name, folder in (("adaptive", args.model), ("base", args.base)):
            if folder:
                found = compare(folder, ids, prompts, dtype, args)
                results[f"{name} {dtype}"] = table(found, f"{name} model, {dtype}, {len(prompts)} prompts")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
