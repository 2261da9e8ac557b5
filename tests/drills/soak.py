"""Hours of mixed decoding in one process: every text is plain decoding's, memory stays flat.

    python -m tests.drills.soak MODEL_DIR HELD_OUT.jsonl --draft DRAFT_DIR --base BASE_DIR
        [--minutes 120] [--seed 0] [--only N]

A case is drawn by the seed and its number: a model, 1 to 8 prompts of mixed lengths, sampling,
stops and three decoders, whose callers read the text to its end or leave.
Models are freed and loaded again. Near-ties in float64 are counted and are no failure. The last
line is JSON; the exit code is 1 if a text differs, a model is still held after it was freed, or
memory grows by more than 2 KiB a request (the interval of Theil and Sen's slope; caches fill in
the first hour).
"""

import argparse
import ctypes
import gc
import json
import random
import sys
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import psutil
import torch
from scipy.stats import theilslopes

from infer import DecodeConfig, DraftConfig, Model, generate, load
from infer.engine.output import Request
from tests.drills.lossless import DRAFTED, OTHERS, SHAPES, arguments, gap, read_code

NEAR_TIE = 1e-4  # in float64; float32 logits of some tens are off by as much
MAX_GROWTH = 2.0  # KiB a request
WARM_UP = 0.25  # of the samples of memory: caches fill
MIN_MINUTES = 10  # of a run whose memory is judged
STOPS = ("\n\n", "def ", "return", "):\n", "self.", "    ", "never there at all", "é")
ENDINGS = ("whole", "whole", "whole", "abandoned", "closed")
PROBED = {"ssd": DecodeConfig("ssd"), "gsd": DecodeConfig("gsd", nodes=20, k=2)}
DECODERS = {  # by model
    "draft": [*SHAPES.values(), *OTHERS.values(), *DRAFTED.values()],
    "adaptive draft": list(PROBED.values()),
    "self": list(DRAFTED.values()),
    "base": [DecodeConfig("plain"), DecodeConfig("prompt_lookup", k=8)],
}


@dataclass
class Case:
    """Prompts with their seeds, the settings of plain decoding, and three decoders."""

    slot: str
    prompts: list[list[int]]
    seeds: list[int]
    settings: dict[str, Any]
    decoders: list[tuple[DecodeConfig, str]]  # each with the ending of its caller
    steps: int  # until a caller leaves


def draw(rng: random.Random, model: Model, code: Sequence[str]) -> Case:
    slot = rng.choice(list(DECODERS))
    prompts = []
    for _ in range(rng.choice([1, 1, 1, 2, 4, 8])):
        source = rng.choice(code)
        start = rng.randrange(max(1, len(source) - 50))
        text = source[start : start + rng.choice([20, 100, 400, 2000])] or source
        prompts.append(model.text.encode(text))
    left = model.context - max(map(len, prompts))
    new = min(left, rng.randint(13, rng.choice([20, 60, 150, 400])))
    settings = {
        "max_new_tokens": new,
        "stop": rng.choice([[], rng.sample(STOPS, 2)]),
    }
    if temperature := rng.choice([0.0, 0.0, 0.2, 0.8, 1.0, 1.5]):
        settings["temperature"] = temperature
        settings["top_p"] = rng.choice([1.0, 0.95, 0.7])
        settings["top_k"] = rng.choice([0, 20])
    decoders = [
        (replace(rng.choice(DECODERS[slot]), **settings), rng.choice(ENDINGS))
        for _ in range(3)
    ]
    seeds = [rng.randrange(2**63) for _ in prompts]
    return Case(slot, prompts, seeds, settings, decoders, rng.randint(1, 12))


def decoded(
    model: Model, case: Case, decode: DecodeConfig, ending: str
) -> list[list[int]]:
    """Return the tokens of each prompt up to the ending of its caller."""
    texts: list[list[int]] = [[] for _ in case.prompts]
    steps = generate(model, case.prompts, decode, seeds=case.seeds)
    for number, step in enumerate(steps):
        texts[step.sequence] += step.tokens
        if ending != "whole" and number == case.steps:
            break
    if ending == "closed":
        steps.close()
    return texts


class Soak:
    """The loaded models, and the results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._seed = args.seed
        adaptive = DraftConfig(args.draft, adaptive=True)
        self._load: dict[str, Callable[[], Model]] = {
            "draft": partial(load, args.model, "float32", draft=args.draft),
            "adaptive draft": partial(load, args.model, "float32", draft=adaptive),
            "self": partial(load, args.model, "float32", draft="self:1"),
            "base": partial(load, args.base, "float32"),
        }
        self._models = {slot: make() for slot, make in self._load.items()}
        self._exact = {slot: make().lm.double() for slot, make in self._load.items()}
        self._code = read_code(args.held_out)
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._memory: list[tuple[int, float]] = []  # requests, KiB

    def case(self, number: int) -> None:
        """Decode a case by all its decoders and compare the texts."""
        rng = random.Random(f"{self._seed}/{number}")
        case = draw(rng, self._models["draft"], self._code)
        model = self._models[case.slot]
        plain = DecodeConfig("plain", **case.settings)
        expected = []
        for prompt, seed in zip(case.prompts, case.seeds):
            alone = replace(case, prompts=[prompt], seeds=[seed])
            expected += decoded(model, alone, plain, "whole")
        for decode, ending in case.decoders:
            self.counts["requests"] += 1
            try:
                texts = decoded(model, case, decode, ending)
            except Exception:  # any error is a result of the drill
                self.errors.append(f"case {number}: {decode}: {traceback.format_exc()}")
                continue
            for index, (text, whole) in enumerate(zip(texts, expected)):
                self.counts["texts"] += 1
                if text == (whole if ending == "whole" else whole[: len(text)]):
                    continue
                request = Request(case.prompts[index], case.seeds[index])
                exact = self._exact[case.slot]
                distance = gap(exact, request, whole, text, plain.sampling)
                if distance < NEAR_TIE:
                    self.counts["near-ties"] += 1
                else:
                    self.errors.append(f"case {number}: {decode}: gap {distance}")

    def reload(self, number: int) -> None:
        """Free a model and load it again."""
        slot = random.Random(number).choice(list(self._load))
        freed = weakref.ref(self._models.pop(slot).lm)
        gc.collect()
        if freed() is not None:
            self.errors.append(f"case {number}: {slot} is still held")
        self._models[slot] = self._load[slot]()

    def sample_memory(self) -> None:
        """Record the memory in use."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        memory = psutil.Process().memory_info()
        kib = (memory.rss - memory.shared) / 1024
        self._memory.append((self.counts["requests"], kib))

    def growth(self) -> Any:
        """Return KiB a request: the slope of the memory, and its 95 % interval."""
        warm = self._memory[int(WARM_UP * len(self._memory)) :]
        requests, kib = zip(*warm)
        return theilslopes(kib, requests, 0.95)


def main() -> None:
    parser = arguments()
    parser.add_argument("--base", required=True)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    soak = Soak(args)
    end = time.monotonic() + 60 * args.minutes
    for number in count() if args.only is None else [args.only]:
        soak.case(number)
        if number % 50 == 49:
            soak.reload(number)
        if number % 4 == 0:
            soak.sample_memory()
        if time.monotonic() > end:
            break
        if number % 20 == 0:
            print(f"case {number}: {dict(soak.counts)} {soak.errors}", flush=True)
    slope = soak.growth()
    is_long = args.minutes >= MIN_MINUTES
    grows = is_long and slope.low_slope > 0 and slope.high_slope > MAX_GROWTH
    figures = {"kib_per_request": list(slope), "errors": soak.errors}
    print(json.dumps({**soak.counts, **figures, "seed": args.seed}))
    sys.exit(bool(soak.errors or grows))


if __name__ == "__main__":
    main()
