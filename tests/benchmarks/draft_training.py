"""Accepted drafts per step after equal training time, by variant of the training, over seeds.

    python -m tests.benchmarks.draft_training DATA BASE OUT [--seconds 60] [--seeds 3]
        [--only NAME ...] [--own DIR --own_seconds S]

DATA and BASE are a prepared folder and the model directory from which every variant starts
(of the demo: runs/demo/data, runs/demo/base/model_directory). A variant is a list of settings
of `python -m train` on top of experiment=demo. Each run is a process on one core and takes as
many steps as fit `--seconds` of CPU time, by a calibration before. `--own` is text of BASE,
prepared (docs/training.md); the `--own_seconds` that it took are taken off.

Then the adaptive tokens alone draft greedy texts of 24 held-out documents with k = L, one
chain, in float32. Runs are kept below OUT and not repeated. Prints a table with means over
seeds, and a line of JSON.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from conf import settings
from conf.stage import read_manifest
from data_prep.vocab import TOKENIZER, load_tokenizer
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.loop import Drafters, Limits, decode
from infer.models.gated import gate_model
from train.config import TrainConfig
from train.lora import PlainWeights
from train.trainer import Trainer

PLAIN = [
    "objective.soft=0",
    "objective.start_rate=0.1",
    "objective.place_weights=uniform",
]
PAPER = [
    *PLAIN,
    "objective.w=1",
    "objective.masked_mean=n",
]  # eq. 9 as the paper weighs it
MASKED = [*PLAIN, "objective.w=2", "objective.masked_mean=masked"]
BRANCH = ["objective=branch", *MASKED]
TAUGHT = [*BRANCH, "objective.soft=0.5"]
BEST = [*TAUGHT, "objective.place_weights=dynamic", "objective.start_rate=0.2"]
GATED = ["lora.rank=128", "lora.alpha=128", "lora.gated=true", "optimizer.lr=3e-3"]
VARIANTS = {
    "causal": ["objective=causal", *PLAIN],
    "dual": ["objective=dual", *PAPER],
    "dual, w 2, masked": ["objective=dual", *MASKED],
    "branch": BRANCH,
    "soft 0.5": TAUGHT,
    "lk": [*BRANCH, "objective.draft_loss=lk"],
    "weights by place": [*BRANCH, "objective.place_weights=dynamic"],
    "start rate 0.2": [*BRANCH, "objective.start_rate=0.2"],
    "gated": [*BRANCH, *GATED],
    "all": BEST,
    "all, lk": [*BEST, "objective.soft=0", "objective.draft_loss=lk"],
    "all, gated": [*BEST, *GATED],
}
OWN = {
    "own text": BRANCH,
    "all, own text": BEST,
    "all, gated, own text": [*BEST, *GATED],
}
WARM_UP_STEPS = 4
TIMED_STEPS = 20
BATCH = 2  # sequences in a step
PROMPTS = 24
PROMPT_TOKENS = 256
NEW_TOKENS = 128


def settings_of(
    args: argparse.Namespace, name: str, *, seed: int, steps: int, out: str
) -> TrainConfig:
    own = [f"data.own={args.own}", "data.own_share=0.5"] if name in OWN else []
    overrides = [
        "experiment=demo",
        f"data.path={args.data}",
        f"model.path={args.base}",
        f"out={out}",
        f"steps={steps}",
        f"seed={seed}",
        "tracker.mode=disabled",
        f"global_batch={BATCH}",
        f"micro_batch={BATCH}",
        f"optimizer.warmup_steps={min(50, math.ceil(steps / 8))}",
    ]
    return settings("train", TrainConfig, [*overrides, *(VARIANTS | OWN)[name], *own])


def run(args: argparse.Namespace, name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train one variant and measure it; with 0 `steps` return the CPU seconds of a step."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        config = settings_of(
            args, name, seed=seed, steps=steps or TIMED_STEPS, out=folder
        )
        trainer = Trainer(config, {}, read_manifest(args.data, "shards", "DATA"))
        if not steps:
            for _ in range(WARM_UP_STEPS):
                trainer.train_step()
            trainer.step = 0
        began = time.process_time()
        for _ in range(config.steps):
            trainer.train_step()
        seconds = time.process_time() - began
        if not steps:
            return {"step_seconds": seconds / TIMED_STEPS}
        metrics, _ = trainer.held_out.run(trainer.engine.forward)
        result = {"steps": steps, "cpu_seconds": seconds, "validation": metrics}
        if config.objective.name != "causal":
            result["reached"] = accepted_drafts(args, trainer, config)
        return result


def accepted_drafts(
    args: argparse.Namespace, trainer: Trainer, config: TrainConfig
) -> list[float]:
    """Return the share of steps whose first j drafts were accepted, for j = 1 to L."""
    lm = (
        gated_model(args, trainer, config)
        if config.lora.gated
        else trainer.module.lm.float().eval()
    )
    lm.set_attn_implementation("sdpa")
    tokenizer = load_tokenizer(Path(args.data) / TOKENIZER)
    vocab = trainer.vocab
    lines = (Path(args.data) / "held_out.jsonl").read_text("utf-8").splitlines()
    documents = [json.loads(line)["content"] for line in lines]
    texts = [text for text in documents if len(text) > 400][:PROMPTS]
    prompts = [
        [vocab.bos, *tokenizer.encode(text[: len(text) // 2]).ids[:PROMPT_TOKENS]]
        for text in texts
    ]
    L = config.objective.L
    ids = config.objective.adaptive_ids(vocab.adaptive)
    new = Drafters(partial(AdaptiveDrafter, ids, FixedPolicy(L, "root")))
    runner = Runner(lm, capacity=PROMPT_TOKENS + NEW_TOKENS + 8, max_rows=4 * L)
    limits = Limits(NEW_TOKENS, {vocab.eos})
    accepted = [
        step.accepted
        for prompt in prompts
        for (step,) in decode(runner, [Request(prompt)], new, limits)
        if step.drafted
    ]
    return [mean(count >= j for count in accepted) for j in range(1, L + 1)]


def gated_model(args: argparse.Namespace, trainer: Trainer, config: TrainConfig) -> Any:
    """Return the base model with the trained adapter, as a decoder reads them."""
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(trainer.module.lm.config)
    weights = trainer.module.lm.state_dict()
    ids = config.objective.adaptive_ids(trainer.vocab.adaptive)
    with TemporaryDirectory() as folder:
        adapter = PlainWeights(
            plain, config.lora, weights, adaptive=ids, merged=False, dtype=torch.float32
        )
        adapter.save_adapter(Path(folder) / "adapter")
        base = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32)
        return gate_model(base.eval(), Path(folder) / "adapter")


def in_process(
    args: argparse.Namespace, name: str, seed: int, steps: int
) -> dict[str, Any]:
    """Return the result of `run` in a process of its own, or that of an earlier call."""
    slug = name.replace(", ", "-").replace(" ", "_")
    path = Path(args.out) / f"{slug}-{seed}-{steps}.json"
    if not path.is_file():
        command = [sys.executable, "-m", "tests.benchmarks.draft_training"]
        chosen = [f"--run={name}", f"--seed={seed}", f"--steps={steps}"]
        result = subprocess.run(
            [*command, *sys.argv[1:], *chosen], check=True, stdout=subprocess.PIPE
        )
        path.write_bytes(result.stdout.splitlines()[-1])
    return json.loads(path.read_text())


def print_table(results: dict[str, list[dict[str, Any]]]) -> None:
    print("| variant | steps | accepted drafts per step, by seed | loss |")
    print("|---|---|---|---|")
    for name, rows in results.items():
        accepted = [sum(row["reached"]) for row in rows if "reached" in row]
        text = f"{mean(accepted):.2f} {accepted}" if accepted else "-"
        loss = mean(row["validation"]["standard_loss"] for row in rows)
        print(f"| {name} | {rows[0]['steps']} | {text} | {loss:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("data", "base", "out"):
        parser.add_argument(name)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--own")
    parser.add_argument("--own_seconds", type=float, default=0.0)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(run(args, args.run, args.seed, args.steps)))
        return
    Path(args.out).mkdir(parents=True, exist_ok=True)
    variants = args.only or [*VARIANTS, *(OWN if args.own else {})]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for seed in range(args.seeds):
        for name in variants:
            seconds = args.seconds - (args.own_seconds if name in OWN else 0)
            calibration = in_process(args, name, 0, 0)
            steps = round(seconds / calibration["step_seconds"])
            results[name].append(in_process(args, name, seed, steps))
    print_table(results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
