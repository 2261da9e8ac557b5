"""Compare training recipes: accepted drafts after equal training time on a real model.

    python -m tests.benchmarks.ladder BASE CHAT CODE PROMPTS... [--seconds 600] [--seeds 2]
        [--only RUNG ...]

BASE is a model directory. CHAT and CODE are prepared text of this model (the demo's are
runs/demo/base, chat and code). PROMPTS are humaneval or files of prompts, messages or documents.
A rung is a recipe: settings of `python -m train` in addition to experiment=demo. The seeds of a
rung train in parallel, each in a process on one core. The number of steps is calibrated so that
they take `--seconds` of CPU time. `dual` trains all weights, as the paper does, on CHAT only.

After training, the adaptive tokens alone draft 12 prompts of each set: one greedy chain with
k = L, in float32. The command prints a line of JSON for each rung, and a table with means over
seeds. To compare what the rows of drafts contain (an adaptive id, an existing id or noise), run

    --only "gated LoRA" "existing id" noise
"""

import argparse
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from conf.architecture import skeleton
from conf.settings.compose import settings
from infer.bench.prompts import name_of, read_prompts
from infer.drafters.planner import FixedPlanner
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.loop import Limits, decode
from infer.models.checkpoint import ModelDirectory, eos_ids
from infer.models.gated import gate_model
from infer.trees.mask_tokens import mask_tokens
from tests.infer.library import by_tokens
from train.config import NOISE, TrainConfig
from train.head import write_head
from train.inputs import read_inputs
from train.lora import PlainWeights
from train.model import AdaptiveLM
from train.spec import read_spec
from train.trainer import Trainer

NO_HEAD = ["objective.previous_token=false"]
ADAMW = ["optimizer.name=adamw"]
ALL_WEIGHTS = ["lora.rank=0", "lora.gated=false", "objective.soft=0", *NO_HEAD]
RUNGS = {
    # The mean embedding: ESP (arXiv 2603.17942) drafts with it without training.
    "no training": [*NO_HEAD, "optimizer.lr=0", "optimizer.min_lr=0"],
    "embedding": [
        *NO_HEAD,
        "optimizer.lr=1e-9",
        "optimizer.min_lr=1e-10",
        "optimizer.rows_rate=1e7",
    ],
    "gated LoRA": NO_HEAD,
    # The same without a row of its own: token 1 in place of the adaptive one, and noise,
    # as SGLang and vLLM draft (arXiv 2609.04010).
    "existing id": [*NO_HEAD, "objective.mask=1"],
    "noise": [*NO_HEAD, "objective.mask=noise"],
    "noise, with head": ["objective.mask=noise"],
    "with head": [],
    "with head, rank 8": ["lora.rank=8"],
    "with head, AdamW": [
        *ADAMW,
        "optimizer.lr=2e-3",
        "optimizer.min_lr=2e-4",
        "optimizer.rows_rate=5",
    ],
    "with head, latent": [],
    "dual": [
        "objective=dual",
        *ALL_WEIGHTS,
        *ADAMW,
        "objective.masked_mean=n",
        "objective.start_rate=0.1",
        "optimizer.lr=1e-4",
        "optimizer.min_lr=1e-5",
    ],
}
WARM_UP_STEPS = 2
TIMED_STEPS = 4
PROMPTS = 12
PROMPT_TOKENS = 256
NEW_TOKENS = 96


def run(args: argparse.Namespace, rung: str, seed: int, steps: int) -> dict[str, Any]:
    """Train one rung and measure it; with steps=0 only measure the time of a step."""
    torch.set_num_threads(1)
    count = steps or TIMED_STEPS
    overrides = [
        "experiment=demo",
        f"data.path={args.chat}",
        f"model.path={args.base}",
        f"steps={count}",
        f"seed={seed}",
        "tracker.mode=disabled",
        "validate_sequences=8",
        f"optimizer.warmup_steps={math.ceil(count / 20)}",
        *([] if rung == "dual" else [f"data.own={args.code}"]),
        *RUNGS[rung],
    ]
    with TemporaryDirectory() as folder:
        config = settings("train", TrainConfig, [*overrides, f"out={folder}"])
        inputs = read_inputs(config)
        trainer = Trainer(config, {}, inputs, read_spec(config, inputs))
        if rung.endswith("latent"):
            add_latent_consistency(trainer.module)
        if not steps:
            for _ in range(WARM_UP_STEPS):
                trainer.train_step()
            trainer.step = 0
        began = time.process_time()
        for _ in range(count):
            trainer.train_step()
        seconds = (time.process_time() - began) / count
        if not steps:
            return {"cpu_seconds": seconds}
        forward = trainer.engine.forward
        held_out, _ = trainer.held_out.run(
            forward, stop=lambda: False, show=lambda line: None
        )
        return {
            "steps": count,
            "cpu_seconds": seconds,
            "standard_loss": held_out["standard_loss"],
            "reached": accepted_drafts(args, trainer),
        }


def add_latent_consistency(module: AdaptiveLM) -> None:
    """Add to the loss the distance of each draft's hidden state to its teacher's.

    Both are normalized; the teacher, in the trunk, gets no gradient (arXiv 2507.11851, §3.3).
    """
    score = module.score

    def with_distance(
        hidden: Tensor,
        labels: Tensor,
        offsets: Tensor,
        weights: Tensor,
        teachers: Tensor,
        corrected: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss, tally, predicted = score(
            hidden, labels, offsets, weights, teachers, corrected
        )
        drafts = teachers >= 0
        assert corrected is not None
        states = corrected[drafts]
        targets = hidden.flatten(0, 1)[teachers[drafts]].detach()
        d = states.shape[-1:]
        distance = (F.rms_norm(states, d) - F.rms_norm(targets, d)).square().mean(-1)
        return loss + (distance * weights[drafts]).sum(), tally, predicted

    module.score = with_distance  # type: ignore[method-assign]


@torch.no_grad()
def accepted_drafts(
    args: argparse.Namespace, trainer: Trainer
) -> dict[str, list[float]]:
    """Return, for each prompt set, the share of steps that accept at least j drafts, j = 1..L."""
    objective = trainer.config.objective
    ids = objective.adaptive_ids(trainer.vocab.adaptive)
    lm = decodable(args, trainer, ids)
    mask = mask_tokens(
        ids or (objective.mask_id or 0,),
        noise=objective.mask == NOISE,
        vocabulary=trainer.vocabulary,
    )
    directory = ModelDirectory(args.base)
    ends = eos_ids(lm) | {trainer.vocab.eos}
    drafters = by_tokens(mask, FixedPlanner(objective.L, "root"))
    capacity = PROMPT_TOKENS + NEW_TOKENS + 8
    runner = Runner(lm, capacity=capacity, max_rows=4 * objective.L)
    reached = {}
    for source in args.prompts:
        prompts = read_prompts(
            source,
            directory.text,
            directory.path,
            count=PROMPTS,
            max_tokens=PROMPT_TOKENS,
            seed=0,
        )
        accepted = [
            step.accepted
            for prompt in prompts
            for (step,) in decode(
                runner, [Request(prompt.ids)], drafters, Limits(NEW_TOKENS, ends)
            )
            if step.drafted
        ]
        reached[name_of(source)] = [
            mean(count >= j for count in accepted) for j in range(1, objective.L + 1)
        ]
    return reached


def decodable(args: argparse.Namespace, trainer: Trainer, ids: Any) -> Any:
    """Return the model for decoding: the trained weights, or the base model with the gated adapter."""
    trained = trainer.module.lm
    config = trainer.config
    if not config.lora.gated:
        trained.set_attn_implementation("sdpa")
        return trained.float().eval()
    base = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32)
    if ids:
        base.resize_token_embeddings(trainer.vocab.size, mean_resizing=False)
    with TemporaryDirectory() as folder:
        adapter = PlainWeights(
            skeleton(trained.config),
            config.lora,
            trained.state_dict(),
            adaptive=ids,
            merged=False,
            dtype=torch.float32,
        )
        adapter.save_adapter(Path(folder) / "adapter")
        state = trainer.module.state_dict()
        write_head(state, Path(folder) / "adapter", torch.float32)
        return gate_model(base.eval(), Path(folder) / "adapter")


def print_table(results: dict[str, list[dict[str, Any]]]) -> None:
    sets = list(next(iter(results.values()))[0]["reached"])
    print(f"| rung | steps | {' | '.join(sets)} | standard loss |")
    print("|---|---|" + "---|" * len(sets) + "---|")
    for rung, rows in results.items():
        cells = []
        for name in sets:
            accepted = [sum(row["reached"][name]) for row in rows]
            by_seed = " ".join(f"{value:.2f}" for value in accepted)
            cells.append(f"{mean(accepted):.2f} ({by_seed})")
        loss = mean(row["standard_loss"] for row in rows)
        print(f"| {rung} | {rows[0]['steps']} | {' | '.join(cells)} | {loss:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("base")
    parser.add_argument("chat")
    parser.add_argument("code")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=list(RUNGS))
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    spawn = get_context("spawn")
    with ProcessPoolExecutor(
        args.seeds, mp_context=spawn, max_tasks_per_child=1
    ) as pool:
        for rung in args.only:
            step = pool.submit(run, args, rung, 0, 0).result()["cpu_seconds"]
            steps = 1 if rung == "no training" else round(args.seconds / step)
            runs = [
                pool.submit(run, args, rung, seed, steps) for seed in range(args.seeds)
            ]
            results[rung] = [each.result() for each in runs]
            print(json.dumps({rung: results[rung]}), flush=True)
    print_table(results)


if __name__ == "__main__":
    main()
