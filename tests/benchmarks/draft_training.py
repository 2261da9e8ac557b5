"""What each idea teaches adaptive tokens in equal time: accepted drafts per step, by variant, over seeds.

    python -m tests.benchmarks.draft_training DATA BASE OUT [--seconds 60] [--seeds 3] [--only NAME ...]
        [--experiment demo] [--own DIR --own_seconds S]

DATA and BASE are a prepared folder and the model directory that every variant starts from (the demo's:
runs/demo/data, runs/demo/base/model_directory). A variant is a list of settings of `python -m train` on top of
the experiment's. Each run is a process of its own on one core: the product's own training steps, as many as
take `--seconds` of CPU time by a calibration that goes first, so that other work on the machine shortens
nobody's training. `--own` is text of BASE, prepared (docs/training.md); making it took `--own_seconds`, which
are taken off its variants' time.

Then the adaptive tokens alone draft greedy texts of 24 held-out documents with k = L, one chain, in float32.
Runs are kept below OUT and not repeated. Prints a table with means over seeds, writes OUT/table.md and
OUT/accepted.png, and ends with a line of JSON.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
WARM, TIMED = 4, 20  # steps of a calibration
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 24, 256, 128


def settings_of(
    args: argparse.Namespace, name: str, *, seed: int, steps: int, out: Path
) -> Any:
    from conf import settings
    from train.config import TrainConfig

    places = [f"data.path={args.data}", f"model.path={args.base}", f"out={out}"]
    run = [
        f"steps={steps}",
        f"seed={seed}",
        "tracker.mode=disabled",
        f"global_batch={args.batch}",
    ]
    run += [
        f"micro_batch={min(2, args.batch)}",
        f"optimizer.warmup_steps={min(50, math.ceil(steps / 8))}",
    ]
    own = [f"data.own={args.own}", "data.own_share=0.5"] if name in OWN else []
    variant = (VARIANTS | OWN)[name]
    return settings(
        "train",
        TrainConfig,
        [f"experiment={args.experiment}", *places, *run, *variant, *own],
    )


def run(
    args: argparse.Namespace, name: str, seed: int, steps: int | None
) -> dict[str, Any]:
    """Train one variant and measure it; without `steps` only time a step, in CPU seconds."""
    import torch

    torch.set_num_threads(1)
    from conf.stage import read_manifest
    from train.trainer import Trainer

    with TemporaryDirectory() as folder:
        config = settings_of(
            args, name, seed=seed, steps=steps or TIMED, out=Path(folder)
        )
        trainer = Trainer(config, {}, read_manifest(args.data, "shards", "DATA"))
        if steps is None:
            for _ in range(WARM):
                trainer.train_step()
            trainer.step = 0
        began = time.process_time()
        for _ in range(config.steps):
            trainer.train_step()
        seconds = time.process_time() - began
        if steps is None:
            return {"step_seconds": seconds / TIMED}
        result: dict[str, Any] = {"steps": steps, "cpu_seconds": seconds}
        metrics, _ = trainer.held_out.run(trainer.engine.forward)
        result |= {"validation": metrics}
        if config.objective.name != "causal":
            result |= accepted_drafts(args, trainer, config)
        return result


def accepted_drafts(
    args: argparse.Namespace, trainer: Any, config: Any
) -> dict[str, Any]:
    """Accepted drafts per step, and the share of steps in which the j-th was accepted with all before it."""

    from data_prep.vocab import TOKENIZER, load_tokenizer
    from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
    from infer.engine.output import Request
    from infer.engine.runner import Runner
    from infer.loop import Drafters, Limits, decode

    lm = (
        gated_model(args, trainer, config)
        if config.lora.gated
        else trainer.module.lm.float().eval()
    )
    lm.set_attn_implementation("sdpa")
    tokenizer, vocab = load_tokenizer(Path(args.data) / TOKENIZER), trainer.vocab
    lines = (Path(args.data) / "held_out.jsonl").read_text("utf-8").splitlines()
    documents = [json.loads(line)["content"] for line in lines]
    texts = [text for text in documents if len(text) > 400][:PROMPTS]
    prompts = [
        [vocab.bos, *tokenizer.encode(text[: len(text) // 2]).ids[:PROMPT_TOKENS]]
        for text in texts
    ]
    L = config.objective.L
    new = Drafters(
        partial(
            AdaptiveDrafter,
            config.objective.adaptive_ids(vocab.adaptive),
            FixedPolicy(L, "root"),
        )
    )
    runner = Runner(lm, capacity=PROMPT_TOKENS + NEW_TOKENS + 8, max_rows=4 * L)
    limits = Limits(NEW_TOKENS, {vocab.eos})
    steps = [
        step
        for prompt in prompts
        for (step,) in decode(runner, [Request(prompt)], new, limits)
    ]
    verified = [step for step in steps if step.drafted]
    reached = [
        sum(step.accepted >= j for step in verified) / len(verified)
        for j in range(1, L + 1)
    ]
    return {"accepted": sum(reached), "reached": reached}


def gated_model(args: argparse.Namespace, trainer: Any, config: Any) -> Any:
    """The base model with the trained adapter, as a decoder reads them."""
    import torch
    from transformers import AutoModelForCausalLM

    from infer.models.gated import gate_model
    from train.lora import PlainWeights

    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(trainer.module.lm.config)
    weights, ids = (
        trainer.module.lm.state_dict(),
        config.objective.adaptive_ids(trainer.vocab.adaptive),
    )
    with TemporaryDirectory() as folder:
        adapter = PlainWeights(
            plain, config.lora, weights, adaptive=ids, merged=False, dtype=torch.float32
        )
        adapter.save_adapter(Path(folder) / "adapter")
        base = AutoModelForCausalLM.from_pretrained(
            args.base, dtype=torch.float32
        ).eval()
        return gate_model(base, Path(folder) / "adapter")


def child(
    args: argparse.Namespace, name: str, seed: int, steps: int | None, path: Path
) -> dict[str, Any]:
    if not path.is_file():
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.draft_training",
            *sys.argv[1:],
            "--run",
            name,
        ]
        command += [
            f"--seed={seed}",
            *([f"--steps={steps}"] if steps else []),
            "--result",
            str(path),
        ]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    return json.loads(path.read_text())


def table(args: argparse.Namespace, results: dict[str, list[dict[str, Any]]]) -> str:
    L = max(len(rows[0].get("reached", [])) for rows in results.values())
    heads = [
        "variant",
        "steps",
        "ms",
        "accepted drafts per step, by seed",
        "of `dual`",
        "on the text",
    ]
    heads += [f"by place 1 to {L}, %", "standard loss", "of `causal`"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, rows in results.items():
        accepted = [row["accepted"] for row in rows if "accepted" in row]
        losses = [row["validation"]["standard_loss"] for row in rows]
        reached = [row["reached"] for row in rows if "reached" in row]
        text = [row["validation"].get("accepted", 0.0) for row in rows]
        cells = [
            name,
            f"{rows[0]['steps']}",
            f"{1000 * rows[0]['calibrated']:.0f}",
            f"{mean(accepted):.2f} ({' '.join(f'{a:.2f}' for a in accepted)})"
            if accepted
            else "-",
            ratio(accepted, [row["accepted"] for row in results.get("dual", [])]),
            f"{mean(text):.2f}" if accepted else "-",
            " ".join(f"{100 * mean(place):.0f}" for place in zip(*reached, strict=True))
            or "-",
            f"{mean(losses):.3f}",
            change(
                losses,
                [
                    row["validation"]["standard_loss"]
                    for row in results.get("causal", [])
                ],
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mean(values: Any) -> float:
    return statistics.mean(values)


def ratio(values: list[float], base: list[float]) -> str:
    return f"{mean(values) / mean(base):.2f}" if values and base else "-"


def change(values: list[float], base: list[float]) -> str:
    return f"{100 * (mean(values) / mean(base) - 1):+.1f} %" if base else "-"


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Accepted drafts per step, a bar for each variant and a dot for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = {
        name: [run["accepted"] for run in runs]
        for name, runs in results.items()
        if "accepted" in runs[0]
    }
    figure, axes = plt.subplots(figsize=(7.2, 0.32 * len(rows) + 1.1))
    names = list(rows)[::-1]
    for place, name in enumerate(names):
        of_paper = name.startswith("dual")
        axes.barh(
            place,
            mean(rows[name]),
            color="#9aa5b1" if of_paper else "#3b7dd8",
            height=0.7,
        )
        axes.plot(
            rows[name], [place] * len(rows[name]), ".", color="black", markersize=4
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("accepted drafts per step, adaptive tokens alone, greedy")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("data", "base", "out"):
        parser.add_argument(name)
    parser.add_argument("--experiment", default="demo")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=2, help="sequences in a step")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--own")
    parser.add_argument("--own_seconds", type=float, default=0.0)
    for name in ("--run", "--result"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--seed", "--steps"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        result = run(args, args.run, args.seed, args.steps)
        Path(args.result).write_text(json.dumps(result))
        return
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    variants = args.only or [*VARIANTS, *(OWN if args.own else {})]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for seed in range(args.seeds):
        for name in variants:
            slug = name.replace(", ", "-").replace(" ", "_")
            step = child(args, name, 0, None, out / f"{slug}-step.json")["step_seconds"]
            steps = round(
                (args.seconds - (args.own_seconds if name in OWN else 0)) / step
            )
            row = child(args, name, seed, steps, out / f"{slug}-{seed}.json")
            results[name].append(row | {"calibrated": step})
            print(
                f"{name} seed {seed}: {steps} steps, accepted {row.get('accepted', 0):.2f}",
                flush=True,
            )
    (out / "table.md").write_text(text := table(args, results))
    plot(results, out / "accepted.png")
    print(text)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
