"""Compare training speed with an earlier commit's: windows per CPU second of one thread.

    git worktree add ../before COMMIT
    python -m tests.benchmarks.training_speed ../before BASE CHAT CODE [--steps 40] [--only]
        [SETTING=VALUE ...]

BASE is a model directory. CHAT and CODE are prepared text of this model (the demo's are runs/demo/base,
chat and code). Both checkouts train experiment=demo with the given settings, each in a process of one
thread. Their steps take turns, so that a busy machine slows both. For each step the command prints the CPU
seconds and the loss of drafts. Then it prints the ratio of windows per second over all steps, over the later
half, and over each quarter. `--only` trains only this checkout. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[2]


def work(settings_: list[str]) -> None:
    """Take one step for each line of standard input; print its figures as a line of JSON."""
    import time

    import torch

    from conf.runs.stage import collect_provenance
    from conf.settings.compose import settings
    from train.__main__ import CHANGEABLE
    from train.config import TrainConfig
    from train.inputs import read_inputs
    from train.spec import read_spec
    from train.trainer import Trainer

    torch.set_num_threads(1)
    out = sys.stdout
    sys.stdout = sys.stderr
    config = settings("train", TrainConfig, settings_)
    inputs = read_inputs(config)
    provenance = collect_provenance(config, inputs.folders, CHANGEABLE)
    trainer = Trainer(config, provenance, inputs, read_spec(config, inputs))
    take = trainer.engine.step
    windows = 0

    def counted(batches: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
        nonlocal windows
        windows = sum(int((batch["offsets"] == 1).sum()) for batch in batches)
        return take(batches, *args, **kwargs)

    trainer.engine.step = counted  # type: ignore[method-assign]
    print(json.dumps({}), file=out, flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        metrics = trainer.train_step()
        seconds = time.process_time() - began
        row = {"seconds": seconds, "windows": windows, "loss": metrics["masked_loss"]}
        print(json.dumps(row), file=out, flush=True)


class Worker:
    """Trains one checkout in a process of its own."""

    def __init__(self, checkout: Path, settings: list[str]) -> None:
        self.rows: list[dict[str, float]] = []
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            # The same values as in launch/stages.sh.
            "MALLOC_MMAP_THRESHOLD_": str(2**32),
            "MALLOC_TRIM_THRESHOLD_": str(2**32),
            "PYTHONPATH": str(checkout),
            "PYTHONSAFEPATH": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", *settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=checkout,
            env=environment,
            text=True,
        )
        self._answer()

    def step(self) -> dict[str, float]:
        """Take one step; return its figures."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.rows.append(self._answer())
        return self.rows[-1]

    def rate(self, share: slice = slice(None)) -> float:
        """Return windows per CPU second over a slice of the steps."""
        rows = self.rows[share]
        return sum(r["windows"] for r in rows) / sum(r["seconds"] for r in rows)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("before", "base", "chat", "code"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", action="store_true")
    args, settings = parser.parse_known_args()
    common = [
        "experiment=demo",
        f"data.path={args.chat.resolve()}",
        f"data.own={args.code.resolve()}",
        f"model.path={args.base.resolve()}",
        "tracker.mode=disabled",
        f"steps={args.steps}",
        *settings,
    ]
    with tempfile.TemporaryDirectory() as folder:
        checkouts = {"now": ROOT} | ({} if args.only else {"before": args.before})
        workers = {
            name: Worker(checkout.resolve(), [*common, f"out={folder}/{name}"])
            for name, checkout in checkouts.items()
        }
        for step in range(args.steps):
            rows = {name: worker.step() for name, worker in workers.items()}
            line = (
                f"{name} {row['seconds']:.2f} s, loss {row['loss']:.4f}"
                for name, row in rows.items()
            )
            print(f"step {step + 1}: {'; '.join(line)}", flush=True)
        for worker in workers.values():
            worker.close()
    print(json.dumps(summary(workers, args.steps)))


def summary(workers: dict[str, Worker], steps: int) -> dict[str, Any]:
    """Return windows per second, their ratios, and the mean loss of the last quarter."""
    parts = {"all": slice(None), "later half": slice(steps // 2, None)}
    quarters = [slice(i * steps // 4, (i + 1) * steps // 4) for i in range(4)]
    rates = {
        name: {part: worker.rate(share) for part, share in parts.items()}
        for name, worker in workers.items()
    }
    losses = {
        name: mean(row["loss"] for row in worker.rows[quarters[-1]])
        for name, worker in workers.items()
    }
    result: dict[str, Any] = {"windows per second": rates, "last losses": losses}
    if len(workers) == 2:
        now, before = workers["now"], workers["before"]
        result["ratio"] = {
            part: now.rate(share) / before.rate(share) for part, share in parts.items()
        }
        result["ratio by quarter"] = [now.rate(q) / before.rate(q) for q in quarters]
    return result


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2:])
    else:
        main()
