"""Compare the measured policy with fixed ones, n-grams alone, and plain decoding.

    python -m tests.benchmarks.policies MODEL_DIR PROMPTS.jsonl [KEY] [--count 12]
        [--new 128] [--base DIR] [--dtypes bfloat16 float32] [--rounds 5]
        [--temperature 0] [--shape 15M|110M|1.1B ...] [--table FILE]
        [--vary NAME=VALUE ...]

Greedy, or sampled with top_k 10 and top_p 0.95; one thread, timed on a CPU by its own
clock, on which other processes leave little trace. Every run stands beside one of plain
decoding (infer/bench/speed.py). A row has the speedup of these pairs with its 95 %
interval (infer/bench/statistics.py), and that over the paper's two forwards at their
best k. `--base` names a model without adaptive tokens in its training, on which the
policy has to fall back to plain decoding. `--shape` adds random models of other sizes,
for their L(q). `--vary` adds the policy with one of its constants changed
(infer/drafters/policy.py): the constants are defended by these rows. The n-grams are
those of the model directory's table, or of --table. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from infer.bench import statistics
from infer.bench.prompts import Prompt
from infer.bench.speed import blocks
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy, Policy
from infer.drafters.policy import CONSTANTS, MeasuredPolicy, prior_costs
from infer.drafters.stopwatch import Stopwatch
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.loop import Drafter, Drafters, Limits
from infer.models.checkpoint import ModelDirectory, eos_ids
from infer.ngrams import Ngrams, NgramTable
from tests.benchmarks.runs import Decoder, Run, clock, loop_decoder
from tests.benchmarks.shapes import SIZES, held_out_prompts, random_llama

PLAIN = "plain"


Pairs = list[
    list[tuple[Run, Run]]
]  # by prompt and round: a decoder's, and plain decoding's beside it


def compare(
    lm: PreTrainedModel,
    ids: tuple[int, ...],
    table: NgramTable | None,
    prompts: list[Prompt],
    dtype: str,
    args: argparse.Namespace,
) -> dict[str, Pairs]:
    capacity = max(len(prompt.ids) for prompt in prompts) + args.new
    sampling = Sampling(args.temperature, 10, 0.95) if args.temperature else Sampling()
    makers = decoders_of(lm, ids, table, sampled=args.temperature > 0, vary=args.vary)
    chosen = {
        name: new
        for name, new in makers.items()
        if name.startswith(tuple(args.only or ("",)))
    }
    runner = Runner(lm, capacity=capacity, max_rows=96)
    limits = Limits(args.new, eos_ids(lm))
    message = time.thread_time if lm.device.type == "cpu" else clock
    decoders = {
        name: loop_decoder(runner, Drafters(new), limits, sampling, clock=message)
        for name, new in {PLAIN: Drafter, **chosen}.items()
    }
    return pairs(decoders, prompts, rounds=args.rounds)


def decoders_of(
    lm: PreTrainedModel,
    ids: tuple[int, ...],
    table: NgramTable | None,
    *,
    sampled: bool,
    vary: Sequence[str],
) -> dict[str, Callable[[], Drafter]]:
    """Return drafters by adaptive tokens alone, by n-grams alone and by all sources."""
    prior = prior_costs(lm.device.type)
    stopwatch = Stopwatch(lm)

    def measured(k: int, **constants: float) -> MeasuredPolicy:
        changed = replace(CONSTANTS, **constants)
        return MeasuredPolicy(prior, k, sampled=sampled, constants=changed)

    adaptive: dict[str, Policy] = {
        **{f"two-forward k={k}": FixedPolicy(k) for k in (1, 2, 3, 5)},
        **{f"one-forward k={k}": FixedPolicy(k, "all") for k in (1, 2, 3)},
        "two sites k=3": FixedPolicy(3, 2),
        "lattice of 8, k=3": FixedPolicy(3, nodes=8, width=4),
        "adaptive, measured": measured(8),
    }
    ngrams: dict[str, Policy] = {f"n-grams, {m}": FixedPolicy(m) for m in (4, 8, 12)}
    ngrams["n-grams, measured"] = measured(0)
    every: dict[str, Policy] = {
        **{f"all, {m}, two-forward k=5": FixedPolicy(5, nodes=m) for m in (8, 12)},
        **{f"all, {m}, one site k=5": FixedPolicy(5, 1, nodes=m) for m in (6, 12)},
        "all, 6, one-forward k=3": FixedPolicy(3, "all", nodes=6),
        "measured": measured(8),
    }
    for item in vary:
        name, value = item.split("=")
        kind = type(getattr(CONSTANTS, name))
        every[f"measured, {item}"] = measured(8, **{name: kind(value)})
    known = Ngrams(table, lm.config.vocab_size)
    new = partial(AdaptiveDrafter, stopwatch=stopwatch)
    makers: dict[str, Callable[[], Drafter]] = {
        name: partial(new, ids, policy) for name, policy in adaptive.items()
    }
    makers |= {name: partial(new, (), policy, known) for name, policy in ngrams.items()}
    return makers | {
        name: partial(new, ids, policy, known) for name, policy in every.items()
    }


def pairs(
    decoders: dict[str, Decoder],
    prompts: list[Prompt],
    *,
    rounds: int,
    baseline: str = PLAIN,
) -> dict[str, Pairs]:
    for decoder in decoders.values():
        decoder(prompts[0])
    names = [name for name in decoders if name != baseline]
    result: dict[str, Pairs] = {name: [[] for _ in prompts] for name in names}
    for turn in range(rounds):
        for index, prompt in enumerate(prompts):
            for block in blocks(names, baseline, turn):
                runs = {name: decoders[name](prompt) for name in block}
                plain = runs.pop(baseline)
                for name, run in runs.items():
                    result[name][index].append((run, plain))
    return result


def rate(run: Run) -> float:
    return len(run.tokens) / run.seconds


def speedup(runs: Pairs) -> Any:
    """Return tokens per second over the baseline's, with the 95 % interval."""
    return statistics.speedup(
        [
            [(base.seconds, rate(run) / rate(base)) for run, base in item]
            for item in runs
        ]
    )


def table(result: dict[str, Pairs], title: str) -> dict[str, dict[str, Any]]:
    speedups = {name: speedup(by) for name, by in result.items()}
    papers = [
        value for name, (value, _) in speedups.items() if name.startswith("two-forward")
    ]
    rows = {}
    print(
        f"{title}\n{'':24} {'x plain':>8} {'95 %':>14} {'x two-forward':>14} {'tok/forward':>12} {'same':>8}"
    )
    for name, by in result.items():
        runs = [pair for prompt in by for pair in prompt]
        same = sum(run.tokens == plain.tokens for run, plain in runs)
        rows[name] = {
            "plain": speedups[name][0],
            "interval": speedups[name][1],
            "paper": speedups[name][0] / max(papers) if papers else None,
            "tokens_per_forward": sum(len(run.tokens) for run, _ in runs)
            / sum(run.forwards for run, _ in runs),
        }
        row, (low, high) = rows[name], speedups[name][1]
        paper = f"{row['paper']:14.2f}" if papers else f"{'':14}"
        print(
            f"{name:24} {row['plain']:8.3f} {f'{low:.3f} {high:.3f}':>14} {paper} "
            f"{row['tokens_per_forward']:12.2f} {same:4}/{len(runs)}"
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
    parser.add_argument("--vary", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--shape", nargs="+", default=[], choices=list(SIZES))
    parser.add_argument(
        "--table",
        type=Path,
        help="of n-grams; the model directory's where none is given",
    )
    parser.add_argument(
        "--only", nargs="+", help="decoders whose name begins so, beside plain"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    ids = ModelDirectory(args.model).need_adaptive().ids
    ngrams = NgramTable(args.table) if args.table else ModelDirectory(args.model).ngrams
    prompts = held_out_prompts(args.model, Path(args.prompts), args.key, args.count)
    results = {}
    for dtype in args.dtypes:
        folders = {"adaptive": args.model} | ({"base": args.base} if args.base else {})
        models: dict[str, Callable[[], PreTrainedModel]] = {
            name: partial(ModelDirectory(folder).load, dtype=dtype)
            for name, folder in folders.items()
        }
        models |= {
            size: partial(random_llama, size, getattr(torch, dtype))
            for size in args.shape
        }
        for name, load in models.items():
            result = compare(load(), ids, ngrams, prompts, dtype, args)
            results[f"{name} {dtype}"] = table(
                result, f"{name} model, {dtype}, {len(prompts)} prompts"
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
