"""What the objectives teach the demo's model in equal steps on equal data: held-out figures and a plot.

    python -m tests.benchmarks.objectives_learn DATA MODEL OUT [--steps 400] [--seeds 3]

DATA and MODEL are those of the demo (runs/demo/data, runs/demo/base/model_directory). Every variant
is a run of `python -m train experiment=demo` below OUT; finished ones are not run again. Prints a
table with means over seeds, writes OUT/standard_loss.png (SDSAT, Appendix A, Figure 5: the loss of standard
tokens, here on held-out sequences) and ends with a line of JSON. A run of 400 steps takes minutes.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

PLAIN = ["objective.soft=0", "objective.start_rate=0.1", "objective.place_weights=uniform"]
EQUATION_9 = [
    "objective.w=1",
    "objective.masked_mean=n",
]  # as the paper weighs; the demo weighs the masked term more
VARIANTS = {
    "causal": ["objective=causal"],
    "basic": ["objective=basic"],
    "dual": ["objective=dual"],
    "branch": ["objective=branch"],
    "dual, w 1": ["objective=dual", *EQUATION_9],
    "branch, w 1": ["objective=branch", *EQUATION_9],
}
SEEDED = ("dual", "branch")  # the others run with the first seed alone


def run(arguments: argparse.Namespace, name: str, seed: int) -> list[dict[str, Any]]:
    """Validations of one variant, oldest first."""
    out = Path(arguments.out) / f"{name.replace(', ', '-').replace(' ', '')}-{seed}"
    if not (out / "manifest.json").is_file():
        settings = [f"data.path={arguments.data}", f"model.path={arguments.model}", f"out={out}"]
        settings += [f"steps={arguments.steps}", f"save_every={arguments.steps}", "optimizer.warmup_steps=40"]
        settings += [f"validate_every={arguments.steps // 4}", f"seed={seed}", "tracker.mode=disabled"]
        command = [sys.executable, "-m", "train", "experiment=demo", *PLAIN, *settings]
        subprocess.run([*command, *VARIANTS[name]], check=True)
    return json.loads((out / "manifest.json").read_text())["validation"]


def plot(runs: dict[str, list[list[dict[str, Any]]]], out: Path) -> None:
    """Held-out standard-token loss by step, of the first seed."""
    figure, axes = plt.subplots(figsize=(6.4, 4))
    for name in ("basic", "dual, w 1", "branch, w 1", "causal"):
        rows = runs[name][0]
        axes.plot([row["step"] for row in rows], [row["standard_loss"] for row in rows], marker="o", label=name)
    axes.set(xlabel="step", ylabel="held-out loss of standard tokens", title="Appendix A on the demo's model")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out / "standard_loss.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("data", "model", "out"):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    runs = {
        name: [run(arguments, name, seed) for seed in range(arguments.seeds if name in SEEDED else 1)]
        for name in VARIANTS
    }
    summary = {}
    print(f"{'after ' + str(arguments.steps) + ' steps':24} standard loss   accepted drafts, each seed")
    for name, found in runs.items():
        last = [validations[-1] for validations in found]
        accepted = [row.get("accepted", 0.0) for row in last]
        summary[name] = {"standard_loss": [row["standard_loss"] for row in last], "accepted": accepted}
        loss = statistics.mean(summary[name]["standard_loss"])
        shown = "  ".join(f"{value:.3f}" for value in accepted)
        print(f"{name:24} {loss:.4f}          {statistics.mean(accepted):.3f}   ({shown})")
    plot(runs, Path(arguments.out))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
