"""Run the measuring planner on texts of a real model with the step times of another device.

    python -m tests.benchmarks.simulated MODEL_DIR PROMPTS... [--device amx ...] [--count 8]
        [--new 96] [--temperature 0] [--dtype float32] [--prior cpu] [--noise 0] [--seed 1] [--adaptive]
        [--vary NAME=VALUE,NAME=VALUE ...] [--fixed K,PROBES,NODES ...]

PROMPTS are humaneval or files of prompts. The planner sees the time that DEVICE takes for the rows
of a step, so the figures do not depend on this machine. DEVICES has measured tables of L(q)
(docs/results.md). A text is decoded once, with adaptive tokens after each of its tokens, and then
replayed: drafts do not change it, so the picks and answers are known. With `--noise` the planner
sees times as on a machine with other programs: longer by an exponentially distributed share with
this mean, and twice as long for the first step of a shape. `--prior` is the planner's expectation:
cpu or cuda (costs.py). The command prints tokens per forward and tokens per plain step, which is
the speedup on that device without the loop's own time.

Rows are n-grams alone and all sources, with the default constants of the planner and with each
`--vary`; all sources with fixed planners (`--fixed`): trees of NODES drafts, with K adaptive tokens
after PROBES of them; with `--adaptive` each row without n-grams too. The last line is JSON.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf.hub import find_folder
from infer.bench.prompts import name_of, read_prompts
from infer.drafters.candidates import ANSWERS, CandidateSource
from infer.drafters.costs import CONSTANTS, Constants, prior_costs
from infer.drafters.drafting import SourceDrafters, Stopwatch
from infer.drafters.planner import FixedPlanner, MeasuredPlanner, Planner
from infer.engine.head import CORRECTED
from infer.engine.output import Candidates, Request
from infer.engine.runner import Runner
from infer.engine.sampling import Sampling
from infer.loop import Drafters, Limits, Verified, decode
from infer.models.checkpoint import ModelDirectory, eos_ids
from infer.ngrams import Ngrams
from infer.trees.mask_tokens import NO_MASK, MaskTokens
from infer.trees.tree import Tree, lineage

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
        (1, 2, 4, 5, 6, 8, 9, 12, 16, 32, 64, 81),
        (1.0, 1.03, 1.08, 1.1, 1.26, 1.47, 1.57, 2.0, 2.6, 5.0, 9.8, 12.5),
        0.07,
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
        self,
        source: CandidateSource,
        planner: Any,
        device: str,
        noise: float,
        seed: int,
    ) -> None:
        self._clock = DeviceTime()
        super().__init__(source, planner, stopwatch=self._clock)
        self._device = DEVICES[device]
        self._noise = noise
        self._rng = np.random.default_rng(seed)
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
    prior = prior_costs(args.prior)
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


@dataclass
class Replay:
    """A text, and the answers of adaptive tokens after its tokens, in place of a Runner.

    It is the output of its forwards too.
    """

    request: Request
    text: list[int]
    answers: list[Candidates | None]  # by the index of the token that they follow
    tree = Tree.chain(0)
    length = 0
    start = 0  # the length before the last forward

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin the text again."""
        self.length = len(self.request.prompt)

    def forward(self, trees: Sequence[Tree], *_: object) -> "Replay":
        """Take the tree of the next step."""
        (self.tree,) = trees
        self.start = self.length
        return self

    def chooser(self, b: int, context: Sequence[int]) -> Callable[[int], int]:
        """Return a function from a node to the token after it, 0 after the text."""
        return lambda node: [*self.text, 0][min(self._next(node), len(self.text))]

    def drafts(self, b: int, node: int, width: int) -> Candidates | None:
        """Return the answers under a node."""
        k = len(self.tree.probes_of(node))
        answers = self.answers[self._next(node) - 1]
        if not k or answers is None:
            return None
        width = max(width, CORRECTED if answers.correct else 0)
        ids = [row[:width] for row in answers.ids[:k]]
        weights = [row[:width] for row in answers.weights[:k]]
        return Candidates(ids, weights, answers.correct)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Move to the end of the path."""
        self.length += len(paths[0])

    def drop(self, b: int) -> None:
        """Do nothing."""

    def _next(self, node: int) -> int:
        return self.start + int(lineage(self.tree.parents)[1][node])


class Recorder(Drafters):
    """Decode plainly, with k adaptive tokens after each token, and keep their answers."""

    max_rows = 1

    def __init__(self, mask: MaskTokens, k: int) -> None:
        self.max_rows, self.width = 1 + k, ANSWERS
        self._mask, self._k = mask, k
        self.answers: dict[int, Candidates | None] = {}
        self._length = 0

    def propose(
        self, contexts: Sequence[Sequence[int]], left: Sequence[int]
    ) -> list[Tree]:
        """See Drafters."""
        (context,) = contexts
        self._length = len(context)
        probes = self._mask.row(self._k, seed=0, length=len(context))
        return [Tree.chain(context[-1], probes=probes)]

    def observe(self, b: int, result: Verified) -> None:
        """See Drafters."""
        self.answers[self._length - 1] = result.answers


def record(
    runner: Runner, request: Request, recorder: Recorder, limits: Limits, s: Sampling
) -> Replay:
    """Return a text that is decoded once."""
    text = list(request.prompt)
    for (step,) in decode(runner, [request], recorder, limits, s):
        text += step.tokens
    answers = [recorder.answers.get(index) for index in range(len(text))]
    return Replay(request, text, answers)


def measure(
    texts: list[Replay], drafters: OnDevice, limits: Limits, sampling: Sampling
) -> dict[str, float]:
    """Decode the texts one after the other; return the figures."""
    for text in texts:
        runner: Any = text
        for _ in decode(runner, [text.request], drafters, limits, sampling):
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
    parser.add_argument("--prior", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
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
        texts = [
            record(
                runner,
                Request(prompt.ids, seed),
                Recorder(mask, adaptive.L),
                limits,
                sampling,
            )
            for seed, prompt in enumerate(prompts)
        ]
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
                    drafters = OnDevice(
                        candidates, planner, device, args.noise, args.seed
                    )
                    row = measure(texts, drafters, limits, sampling)
                    name = f"{name_of(source)}, {device}, {kind if tables else f'{kind}, adaptive'}"
                    results[name] = row
                    cells = (f"{value:.2f} {key}" for key, value in row.items())
                    print(f"{name}: {', '.join(cells)}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
