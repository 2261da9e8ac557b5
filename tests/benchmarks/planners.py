"""Compare the measuring planner with fixed planners, n-grams alone and plain decoding.

    python -m tests.benchmarks.planners MODEL_DIR PROMPTS.jsonl [--count 12]
        [--base DIR] [--dtypes bfloat16 float32]
        [--temperature 0] [--shape 15M|110M|1.1B ...] [--vary NAME=VALUE ...]

It runs five rounds of 128 tokens, greedy or sampled with top_k 10 and top_p 0.95, on one thread.
On a CPU it takes the thread's CPU time, which other processes hardly change. The runs alternate
with plain decoding (infer/bench/speed.py). A row has the speedup over plain decoding with its
95 % interval (infer/bench/timing.py), and the speedup over the paper's two forwards with their
best k. `--base` adds a model without trained adaptive tokens, where the planner has to fall back
to plain decoding. `--shape` adds random models of other sizes, which have another L(q). `--vary`
adds planners with one changed constant (infer/drafters/costs.py); these rows justify the
constants. The n-grams come from the table in the model directory. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from infer.bench.prompts import Prompt
from infer.bench.speed import measure_turn, rows_of
from infer.drafters.costs import CONSTANTS, prior_costs
from infer.drafters.planner import FixedPlanner, MeasuredPlanner, Planner
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.loop import Drafters, Limits
from infer.models.checkpoint import ModelDirectory, eos_ids
from infer.ngrams import Ngrams
from infer.trees.mask_tokens import NO_MASK
from tests.benchmarks.runs import clock, loop_decoder
from tests.benchmarks.shapes import SIZES, held_out_prompts, random_llama
from tests.infer.library import by_tokens

NEW = 128  # tokens
ROUNDS = 5


def drafters_of(
    lm: PreTrainedModel, folder: ModelDirectory, args: argparse.Namespace
) -> dict[str, Drafters]:
    """Return drafters with adaptive tokens alone, with n-grams alone and with all sources."""
    prior = prior_costs(lm.device.type)

    def measured(k: int, **constants: Any) -> MeasuredPlanner:
        changed = replace(CONSTANTS, **constants)
        return MeasuredPlanner(prior, k, constants=changed)

    adaptive: dict[str, Planner] = {
        **{f"two-forward k={k}": FixedPlanner(k) for k in (1, 2, 3, 5)},
        **{f"one-forward k={k}": FixedPlanner(k, "all") for k in (1, 2, 3)},
        "adaptive, measured": measured(8),
    }
    ngrams: dict[str, Planner] = {
        f"n-grams, {m}": FixedPlanner(nodes=m) for m in (4, 8, 12)
    }
    ngrams["n-grams, measured"] = measured(0)
    every: dict[str, Planner] = {
        **{f"all, {m}, two-forward k=5": FixedPlanner(5, nodes=m) for m in (8, 12)},
        **{f"all, {m}, one site k=5": FixedPlanner(5, 1, nodes=m) for m in (6, 12)},
        "all, 6, one-forward k=3": FixedPlanner(3, "all", nodes=6),
        "measured": measured(8),
    }
    for item in args.vary:
        name, value = item.split("=")
        kind = type(getattr(CONSTANTS, name))
        every[f"measured, {item}"] = measured(8, **{name: kind(value)})
    table = Ngrams(folder.ngrams, lm.config.vocab_size)
    mask = folder.need_adaptive().mask(lm.config.get_text_config().vocab_size)
    result = {"plain": Drafters()}
    for planners, tokens, source in (
        (adaptive, mask, None),
        (ngrams, NO_MASK, table),
        (every, mask, table),
    ):
        for name, planner in planners.items():
            result[name] = by_tokens(tokens, planner, source)
    return result


def compare(
    lm: PreTrainedModel,
    folder: ModelDirectory,
    prompts: list[Prompt],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Measure all decoders; return their rows as infer/bench/speed.py does."""
    capacity = max(len(prompt.ids) for prompt in prompts) + NEW
    sampling = Sampling(args.temperature, 10, 0.95) if args.temperature else Sampling()
    runner = Runner(lm, capacity=capacity, max_rows=96)
    limits = Limits(NEW, eos_ids(lm))
    timer = time.thread_time if lm.device.type == "cpu" else clock
    decoders = {
        name: loop_decoder(runner, drafters, limits, sampling, clock=timer)
        for name, drafters in drafters_of(lm, folder, args).items()
    }
    for decoder in decoders.values():
        decoder(prompts[0])
    records = {}
    for turn in range(ROUNDS):
        for prompt in prompts:
            runs = measure_turn({args.temperature: decoders}, prompt, turn)
            key = f"{turn} {prompt.id}"
            records[key] = {"prompt_set": "", "prompt": prompt.id, "runs": runs}
    return rows_of(records, list(decoders))


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Print the table of a model: speedups, tokens per forward and equal texts."""
    best = max(
        row["speedup"] for row in rows if row["decoder"].startswith("two-forward")
    )
    print(f"{title}\n{'':24} x plain          95 %  x two-forward tok/forward     same")
    for row in rows:
        low, high = row["speedup_interval"] or (float("nan"), float("nan"))
        print(
            f"{row['decoder']:24} {row['speedup']:7.3f} {low:6.3f} {high:6.3f} "
            f"{row['speedup'] / best:14.2f} {row['tokens_per_forward']:11.2f} "
            f"{row['same']:4}/{row['compared']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--base")
    parser.add_argument("--vary", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--shape", nargs="+", default=[], choices=list(SIZES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    directory = ModelDirectory(args.model)
    prompts = held_out_prompts(args.model, Path(args.prompts), args.count)
    models: dict[str, Callable[..., PreTrainedModel]] = {"adaptive": directory.load}
    if args.base:
        models["base"] = ModelDirectory(args.base).load
    for size in args.shape:
        models[size] = partial(random_llama, size)
    results = {}
    for dtype in args.dtypes:
        for name, load in models.items():
            rows = compare(load(dtype=dtype), directory, prompts, args)
            show(rows, f"{name} model, {dtype}, {len(prompts)} prompts")
            results[f"{name} {dtype}"] = rows
    print(json.dumps(results))


if __name__ == "__main__":
    main()
