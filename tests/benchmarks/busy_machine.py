"""Compare speedups of a quiet machine with those measured under bursts of other work.

    python -m tests.benchmarks.busy_machine MODEL_DIR OUT [--count 10] [--rounds 3] [--new 96]
        [--longest 20] [--threads 1] [--decoders hybrid ngrams]

The command runs `python -m infer.bench part=speed` into OUT/quiet. Then it runs it into OUT/busy
while one process per core computes in bursts of 1 to `longest` seconds, with pauses as long. From
both it prints each decoder's speedup by several estimates, and the error of the busy run.
Finished parts are not measured again. The machine must be quiet otherwise. With SmolLM2-135M on
two cores the quiet run takes about 25 minutes and the busy run 40.

    lower decile    lower decile of the steps of equal shape: the report's (infer/bench/timing.py)
    lower quartile  the same with the lower quartile
    median          the same with the median
    CPU time        the same with the median of the steps' CPU seconds
    best of rounds  the fastest run of each prompt
    pairs           the median ratio to the nearest plain run
"""

import argparse
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from conf.runs.files import read_result
from infer.bench.names import PLAIN
from infer.bench.speed import timed_steps, whole_texts
from infer.bench.timing import StepTimes, TextTimes, TimedStep, speedup

Runs = list[list[dict[str, Any]]]  # by prompt
Steps = list[list[list[TimedStep]]]
# Takes the runs of plain decoding, the runs of a decoder, and the seconds of each prompt's fastest
# first step; returns the speedup.
Estimate = Callable[[Runs, Runs, Sequence[float]], float]


def burn(seed: int, longest: float) -> None:
    """Compute in bursts of random length, with pauses, until the process is killed."""
    rng = random.Random(seed)
    while True:
        until = time.monotonic() + rng.uniform(1, longest)
        while time.monotonic() < until:
            sum(range(10_000))
        time.sleep(rng.uniform(1, longest))


@contextmanager
def bursts(longest: float) -> Iterator[None]:
    """Run a process with bursts for each core; the same seed makes the bursts coincide."""
    burners = [
        multiprocessing.Process(target=burn, args=(0, longest), daemon=True)
        for _ in range(os.cpu_count() or 1)
    ]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()


def measure(args: argparse.Namespace, out: Path) -> None:
    """Run the speed part of the report."""
    command = [sys.executable, "-m", "infer.bench", "part=speed"]
    command += [f"model={args.model}", f"out={out}", f"count={args.count}"]
    command += [f"threads={args.threads}", f"speed.rounds={args.rounds}"]
    command += [f"speed.decoders=[{','.join(args.decoders)}]", "speed.peers=[generate]"]
    command += [f"speed.max_new_tokens={args.new}", "speed.temperatures=[0]"]
    command += ["dtype=float32", "tracker.mode=disabled"]
    subprocess.run(command, check=True)


def runs_of(out: Path) -> dict[str, Runs]:
    """Return the runs by decoder and prompt, each with the seconds of the nearest plain run."""
    prompts: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for file in sorted((out / "speed" / "records").glob("*.json")):
        record = read_result(file)
        runs = record["runs"]
        plain = [at for at, run in enumerate(runs) if run["decoder"] == PLAIN]
        for at, run in enumerate(runs):
            nearest = min(plain, key=lambda other: abs(other - at))
            run["pair"] = runs[nearest]["seconds"]
            by_prompt = prompts.setdefault(run["decoder"], {})
            by_prompt.setdefault(record["prompt"], []).append(run)
    return {name: list(by_prompt.values()) for name, by_prompt in prompts.items()}


def cpu_steps(prompts: Runs) -> Steps:
    """Return the steps with CPU seconds in place of elapsed seconds."""
    result = []
    for runs in prompts:
        steps = [StepTimes.parse(run["steps"]) for run in runs]
        result.append(
            [
                [
                    (shape, 1e-6 * cpu)
                    for (shape, _), cpu in zip(s.timed(), s.cpu_microseconds)
                ]
                for s in steps
            ]
        )
    return result


def by_steps(
    quantile: float, steps_of: Callable[[Runs], Steps] = timed_steps
) -> Estimate:
    """Return an estimate that takes this quantile over the steps of equal shape."""

    def estimate(plain: Runs, prompts: Runs, first: Sequence[float]) -> float:
        times = [
            TextTimes(steps_of(each), first, quantile) for each in (plain, prompts)
        ]
        return float(speedup(times[0], times[1], [1.0] * len(prompts))[0])

    return estimate


def by_fastest_runs(plain: Runs, prompts: Runs, first: Sequence[float]) -> float:
    """Return the speedup from the fastest run of each prompt."""
    times = [whole_texts(each) for each in (plain, prompts)]
    return float(speedup(times[0], times[1], [1.0] * len(prompts))[0])


def by_pairs(plain: Runs, prompts: Runs, first: Sequence[float]) -> float:
    """Return the speedup from the ratios to the nearest plain run."""
    seconds = [median(run["pair"] for run in runs) for runs in prompts]
    ratios = [median(run["pair"] / run["seconds"] for run in runs) for runs in prompts]
    return sum(seconds) / sum(t / r for t, r in zip(seconds, ratios))


ESTIMATES: dict[str, Estimate] = {
    "lower decile": by_steps(0.1),
    "lower quartile": by_steps(0.25),
    "median": by_steps(0.5),
    "CPU time": by_steps(0.5, cpu_steps),
    "best of rounds": by_fastest_runs,
    "pairs": by_pairs,
}


def tokens_per_forward(prompts: Runs) -> float:
    """Return the tokens per forward of all runs."""
    runs = [run for runs in prompts for run in runs]
    return sum(run["tokens"] for run in runs) / sum(run["forwards"] for run in runs)


def fastest_first(decoders: dict[str, Runs]) -> list[float]:
    """Return the seconds of each prompt's fastest first step."""
    by_prompt = zip(*decoders.values())
    return [min(run["first_seconds"] for r in runs for run in r) for runs in by_prompt]


def show(quiet: dict[str, Runs], busy: dict[str, Runs], marks: Sequence[str]) -> None:
    """Print the speedups of the quiet and the busy run by each estimate."""
    print(f"marks of the busy run: {', '.join(marks) or 'no marks'}")
    measured = [(each, fastest_first(each)) for each in (quiet, busy)]
    for name in quiet:
        if name == PLAIN:
            continue
        tokens = [tokens_per_forward(each[name]) for each in (quiet, busy)]
        print(f"{name}: tokens per forward {tokens[0]:.2f} quiet, {tokens[1]:.2f} busy")
        for title, estimate in ESTIMATES.items():
            values = [estimate(m[PLAIN], m[name], first) for m, first in measured]
            error = values[1] / values[0] - 1
            print(
                f"    {title:15} {values[0]:6.3f} {values[1]:6.3f} {100 * error:+6.1f} %"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--longest", type=float, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--decoders", nargs="+", default=["hybrid", "ngrams"])
    args = parser.parse_args()
    measure(args, args.out / "quiet")
    with bursts(args.longest):
        measure(args, args.out / "busy")
    rows = read_result(args.out / "busy" / "speed" / "result.json")["rows"]
    marks = dict.fromkeys(mark for row in rows for mark in row["marks"])
    show(runs_of(args.out / "quiet"), runs_of(args.out / "busy"), list(marks))


if __name__ == "__main__":
    main()
