"""Accepted drafts per step after equal training time, by variant of the training, over seeds.

    python -m tests.benchmarks.draft_training DATA BASE [--seconds 60] [--seeds 3]
        [--only NAME ...] [--own DIR --own_seconds S]

DATA and BASE are a prepared folder and the model directory from which every variant starts
(of the demo: runs/demo/documents, runs/demo/base). A variant is a list of settings
of `python -m train` on top of tests/recipes.py. Each run is a process on one core and takes as
many steps as fit `--seconds` of CPU time, by a calibration before. `--own` is text of BASE,
prepared (docs/training.md); the `--own_seconds` that it took are taken off.

Then the adaptive tokens alone draft greedy texts of 24 held-out documents with k = L, one
chain, in float32. Prints a line of JSON for each variant, and a table with means over seeds.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from conf import settings
from conf.files import read_rows
from conf.stage import read_manifest
from data_prep.vocab import TOKENIZER, load_tokenizer
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.loop import Drafters, Limits, decode
from infer.models.gated import gate_model
from tests.recipes import FINE_TUNE
from train.config import TrainConfig
from train.lora import PlainWeights
from train.pretrained import skeleton
from train.trainer import Trainer

PLAIN = [
    "objective.soft=0",
    "objective.start_rate=0.1",
    "objective.place_weights=uniform",
]
BRANCH = [
    "objective=branch",
    *PLAIN,
    "objective.w=2",
    "objective.masked_mean=masked",
]
BEST = [
    *BRANCH,
    "objective.soft=0.5",
    "objective.place_weights=dynamic",
    "objective.start_rate=0.2",
]
GATED = ["lora.rank=128", "lora.alpha=128", "lora.gated=true", "optimizer.lr=3e-3"]
VARIANTS = {
    "causal": ["objective=causal", *PLAIN],
    # Eq. 9 as the paper weighs it.
    "dual": ["objective=dual", *PLAIN, "objective.w=1", "objective.masked_mean=n"],
    "branch": BRANCH,
    "lk": [*BRANCH, "objective.draft_loss=lk"],
    "gated": [*BRANCH, *GATED],
    "all": BEST,
    "all, gated": [*BEST, *GATED],
}
OWN = {"own text": BRANCH, "all, gated, own text": [*BEST, *GATED]}
WARM_UP_STEPS = 4
TIMED_STEPS = 20
BATCH = 2  # sequences in a step
PROMPTS = 24
PROMPT_TOKENS = 256
NEW_TOKENS = 128


def run(args: argparse.Namespace, name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train one variant and measure it; with 0 `steps` only time a step."""
    torch.set_num_threads(1)
    count = steps or TIMED_STEPS
    overrides = [
        *FINE_TUNE,
        f"data.path={args.data}",
        f"model.path={args.base}",
        f"steps={count}",
        f"seed={seed}",
        "tracker.mode=disabled",
        f"global_batch={BATCH}",
        f"micro_batch={BATCH}",
        f"optimizer.warmup_steps={min(50, math.ceil(count / 8))}",
        *(VARIANTS | OWN)[name],
    ]
    if name in OWN:
        overrides += [f"data.own={args.own}", "data.own_share=0.5"]
    with TemporaryDirectory() as folder:
        config = settings("train", TrainConfig, [*overrides, f"out={folder}"])
        trainer = Trainer(config, {}, read_manifest(args.data, "shards", "DATA"))
        if not steps:
            for _ in range(WARM_UP_STEPS):
                trainer.train_step()
            trainer.step = 0
        began = time.process_time()
        for _ in range(count):
            trainer.train_step()
        result = {"steps": count, "cpu_seconds": (time.process_time() - began) / count}
        if steps:
            forward = trainer.engine.forward
            result |= trainer.held_out.run(
                forward, stop=lambda: False, show=lambda line: None
            )
            drafts = name != "causal"
            result["reached"] = accepted_drafts(args, trainer) if drafts else 0.0
        return result


def accepted_drafts(args: argparse.Namespace, trainer: Trainer) -> float:
    """Return the accepted drafts of a step that had any."""
    vocab, objective = trainer.vocab, trainer.config.objective
    ids = objective.adaptive_ids(vocab.adaptive)
    lm = decodable(args, trainer, ids)
    tokenizer = load_tokenizer(Path(args.data) / TOKENIZER)
    rows = read_rows(Path(args.data) / "held_out.jsonl")
    documents = [row["content"] for row in rows]
    texts = [text for text in documents if len(text) > 400][:PROMPTS]
    drafters = Drafters(partial(AdaptiveDrafter, ids, FixedPolicy(objective.L, "root")))
    capacity = PROMPT_TOKENS + NEW_TOKENS + 8
    runner = Runner(lm, capacity=capacity, max_rows=4 * objective.L)
    limits = Limits(NEW_TOKENS, {vocab.eos})
    accepted = []
    for text in texts:
        prompt = tokenizer.encode(text[: len(text) // 2]).ids[:PROMPT_TOKENS]
        request = Request([vocab.bos, *prompt])
        steps = decode(runner, [request], drafters, limits)
        accepted += [step.accepted for (step,) in steps if step.drafted]
    return mean(accepted)


def decodable(args: argparse.Namespace, trainer: Trainer, ids: Sequence[int]) -> Any:
    """Return the trained model, or the base model with a gated adapter, for decoding."""
    trained = trainer.module.lm
    lora = trainer.config.lora
    if not lora.gated:
        trained.set_attn_implementation("sdpa")
        return trained.float().eval()
    base = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32)
    with TemporaryDirectory() as folder:
        adapter = PlainWeights(
            skeleton(trained.config),
            lora,
            trained.state_dict(),
            adaptive=ids,
            merged=False,
            dtype=torch.float32,
        )
        adapter.save_adapter(Path(folder) / "adapter")
        return gate_model(base.eval(), Path(folder) / "adapter")


def print_table(results: dict[str, list[dict[str, Any]]]) -> None:
    print(
        "| variant | seconds a step | steps | accepted drafts per step, by seed | loss |"
    )
    print("|---|---|---|---|---|")
    for name, rows in results.items():
        accepted = [row["reached"] for row in rows]
        loss = mean(row["standard_loss"] for row in rows)
        seconds = mean(row["cpu_seconds"] for row in rows)
        steps = f"{seconds:.3f} | {rows[0]['steps']}"
        print(f"| {name} | {steps} | {mean(accepted):.2f} {accepted} | {loss:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("base")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--own")
    parser.add_argument("--own_seconds", type=float, default=0.0)
    args = parser.parse_args()
    variants = args.only or [*VARIANTS, *(OWN if args.own else {})]
    results: dict[str, list[dict[str, Any]]] = {}
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for name in variants:
            seconds = args.seconds - (args.own_seconds if name in OWN else 0)
            step = pool.submit(run, args, name, 0, 0).result()["cpu_seconds"]
            steps = round(seconds / step)
            results[name] = [
                pool.submit(run, args, name, seed, steps).result()
                for seed in range(args.seeds)
            ]
            print(json.dumps({name: results[name]}), flush=True)
    print_table(results)


if __name__ == "__main__":
    main()
