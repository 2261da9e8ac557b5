"""Run the measuring planner on texts of a real model with the step times of another device.

    python -m tests.benchmarks.simulated MODEL_DIR PROMPTS... [--device amx ...] [--count 8]
        [--new 96] [--temperature 0] [--dtype float32] [--noise 0] [--adaptive]
        [--vary NAME=VALUE,NAME=VALUE ...] [--fixed K,PROBES,NODES ...]

PROMPTS are humaneval or files of prompts. The forwards run on this machine, but the planner sees
the time that DEVICE takes for the rows of a step, so the figures do not depend on this machine.
DEVICES has measured tables of L(q) (docs/results.md). With `--noise` the planner sees times as on a
machine with other programs: longer by an exponentially distributed share with this mean, and twice
as long for the first step of a shape. The command prints tokens per forward and
tokens per plain step, which is the speedup on that device without the loop's own time. `--adaptive`
adds all rows without n-grams. Rows are:
n-grams alone and all sources, with the default constants of the planner and with each `--vary`;
and all sources with fixed planners (`--fixed`): trees of NODES drafts, with K adaptive tokens
after PROBES of them. The last line is JSON.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf.hub import find_folder
from infer.bench.prompts import Prompt, name_of, read_prompts
from infer.drafters.candidates import CandidateSource
from infer.drafters.costs import CONSTANTS, Constants, prior_costs
from infer.drafters.drafting import SourceDrafters, Stopwatch
from infer.drafters.planner import FixedPlanner, MeasuredPlanner, Planner
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.loop import Limits, Verified, decode
from infer.models.checkpoint import ModelDirectory, eos_ids
from infer.ngrams import Ngrams
from infer.trees.mask_tokens import NO_MASK

#: Numbers of rows and L(q) there, and the extra time of a step with probes, both in plain steps.
DEVICES = {
    "amx": (  # bfloat16
        (1, 2, 4, 8, 16, 32, 64, 81),
        (1.0, 1.0, 1.0, 1.03, 1.06, 1.25, 1.5, 1.7),
        0.2,
    ),
    "vnni": (  # int8
        (1, 2, 4, 8, 16, 32, 64, 81),
        (1.0, 1.04, 1.19, 1.4, 1.67, 2.2, 3.3, 4.0),
        0.1,
    ),
    "avx2": (  # float32
        (1, 2, 4, 8, 16, 32, 64, 81),
        (1.0, 1.13, 1.31, 1.62, 2.43, 3.26, 5.38, 6.8),
        0.1,
    ),
    "avx2-int8": (
        (1, 2, 4, 6, 7, 9, 12, 16, 32, 64, 81),
        (1.0, 1.0, 1.07, 1.2, 1.62, 1.85, 2.25, 3.0, 5.6, 11.0, 14.0),
        0.11,
    ),
    "h100": (  # 7B, bfloat16
        (1, 2, 4, 8, 16, 32, 64, 81),
        (1.0, 1.06, 1.08, 1.11, 1.15, 1.13, 1.15, 1.28),
        0.1,
    ),
}


class DeviceTime(Stopwatch):
    """A stopwatch that reports `seconds` as the time of every step."""

    seconds = 0.0

    @contextmanager
    def observing(self) -> Iterator[float]:
        """Yield the reported time of the step."""
        yield self.seconds


class OnDevice(SourceDrafters):
    """Drafters that report a device's time for each step, and count steps, tokens and rows.

    `plain_steps` is the total time in steps of plain decoding.
    """

    def __init__(
        self, source: CandidateSource, planner: Any, device: str, noise: float
    ) -> None:
        self._clock = DeviceTime()
        super().__init__(source, planner, stopwatch=self._clock)
        self._device = DEVICES[device]
        self._noise = noise
        self._rng = np.random.default_rng(1)
        self._shapes: set[tuple[int, bool]] = set()
        self.steps = self.tokens = self.rows = 0
        self.plain_steps = 0.0

    def observe(self, b: int, result: Verified) -> None:
        """Set the time of the step by its rows and probes; count it."""
        rows, costs, probing = self._device
        seconds = float(np.interp(result.rows, rows, costs)) + result.probed * probing
        self.steps += 1
        self.rows += result.rows
        self.tokens += len(result.tokens)
        self.plain_steps += seconds
        if self._noise:
            shape = result.rows, result.probed
            seconds *= 1 + self._rng.exponential(self._noise)
            seconds *= 1 if shape in self._shapes else 2
            self._shapes.add(shape)
        self._clock.seconds = seconds
        super().observe(b, result)


def constants_of(text: str) -> Constants:
    """Return the planner's constants with changes such as "width=4,max_rows=96"."""
    changed = {}
    for item in filter(None, text.split(",")):
        name, value = item.split("=")
        changed[name] = type(getattr(CONSTANTS, name))(value)
    return replace(CONSTANTS, **changed)


def planners(L: int, args: argparse.Namespace) -> dict[str, Planner]:
    """Return new planners by name; the first is for n-grams alone."""
    prior = prior_costs("cpu")
    result: dict[str, Planner] = {"n-grams": MeasuredPlanner(prior, 0)}
    for vary in ["", *args.vary]:
        constants = constants_of(vary)
        planner = MeasuredPlanner(prior, L, constants=constants)
        result[f"all {vary}".strip()] = planner
    for fixed in args.fixed:
        k, probes, nodes = fixed.split(",")
        result[f"all, fixed {fixed}"] = FixedPlanner(
            int(k), probes, int(nodes), width=4
        )
    return result


def measure(
    runner: Runner,
    drafters: OnDevice,
    prompts: list[Prompt],
    limits: Limits,
    sampling: Sampling,
) -> dict[str, float]:
    """Decode the prompts one after the other; return the figures."""
    for seed, prompt in enumerate(prompts):
        for _ in decode(
            runner, [Request(prompt.ids, seed)], drafters, limits, sampling
        ):
            pass
    return {
        "tokens per forward": drafters.tokens / drafters.steps,
        "tokens per plain step": drafters.tokens / drafters.plain_steps,
        "rows": drafters.rows / drafters.steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--device", nargs="+", default=["amx"], choices=list(DEVICES))
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--adaptive", action="store_true")
    parser.add_argument("--vary", nargs="*", default=[])
    parser.add_argument("--fixed", nargs="*", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    directory = ModelDirectory(Path(find_folder(args.model)))
    lm = directory.load(dtype=args.dtype, device="cpu")
    runner = Runner(lm, capacity=256 + args.new + 8, max_rows=128)
    ngrams = Ngrams(directory.ngrams, lm.config.vocab_size)
    adaptive = directory.need_adaptive()
    mask = adaptive.mask(lm.config.vocab_size)
    limits = Limits(args.new, eos_ids(lm))
    sampling = Sampling(args.temperature)
    results: dict[str, dict[str, float]] = {}
    for source in args.prompts:
        prompts = read_prompts(
            source,
            directory.text,
            directory.path,
            count=args.count,
            max_tokens=256,
            seed=0,
        )
        for device in args.device:
            for kind, planner in planners(adaptive.L, args).items():
                alone = [None] if args.adaptive and planner.max_probes else []
                for tables in [ngrams, *alone]:
                    candidates = CandidateSource(
                        mask if planner.max_probes else NO_MASK,
                        planner.max_probes,
                        width=planner.width,
                        ngrams=tables,
                    )
                    drafters = OnDevice(candidates, planner, device, args.noise)
                    row = measure(runner, drafters, prompts, limits, sampling)
                    name = f"{name_of(source)}, {device}, {kind if tables else f'{kind}, adaptive'}"
                    results[name] = row
                    cells = (f"{value:.2f} {key}" for key, value in row.items())
                    print(f"{name}: {', '.join(cells)}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
