"""Decode mixed cases in one process for hours: texts must equal plain decoding's, memory must not grow.

    python -m tests.drills.soak MODEL_DIR HELD_OUT.jsonl --draft DRAFT_DIR --base BASE_DIR
        [--minutes 120] [--seed 0] [--only N]

The seed and the number of a case determine its model, 1 to 8 prompts of mixed lengths, sampling,
stops and three decoders. Their texts are read to the end or only in part. Models are freed and
loaded again. Near-ties in float64 are counted and do not fail. The last line is JSON. The exit
code is 1 if a text differs, if a freed model is still referenced, or if memory grows by more than
2 KiB per request (by the interval of the Theil-Sen slope, without the first quarter, while
caches fill).
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
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import psutil
import torch
from scipy.stats import theilslopes

from infer import DecodeConfig, DraftConfig, load
from infer.engine.output import Request
from tests.drills.lossless import (
    DRAFTED,
    MORE_DECODERS,
    SAMPLINGS,
    SHAPES,
    arguments,
    gap,
    prompts_of,
    texts_of,
)

NEAR_TIE = 1e-4  # in float64; float32 logits of some tens have errors of this size
MAX_GROWTH = 2.0  # KiB per request
WARM_UP = 0.25  # share of the memory samples to skip, while caches fill
MIN_MINUTES = 10  # shorter runs do not check memory
STOPS = ("\n\n", "def ", "return", "):\n", "self.", "    ", "never there at all", "é")
# The decoders of each model.
DECODERS = {
    "draft": [*SHAPES.values(), *MORE_DECODERS.values(), *DRAFTED.values()],
    "adaptive draft": [DecodeConfig("ssd"), DecodeConfig("gsd", nodes=20, children=2)],
    "self": list(DRAFTED.values()),
    "base": [DecodeConfig("plain"), DecodeConfig("prompt_lookup", nodes=8)],
}


class Soak:
    """The loaded models, and the results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._seed = args.seed
        adaptive = DraftConfig(args.draft, adaptive=True)
        drafts = {"draft": args.draft, "adaptive draft": adaptive, "self": "self:1"}
        self._load = {
            slot: partial(load, args.model, "float32", draft=draft)
            for slot, draft in drafts.items()
        }
        self._load["base"] = partial(load, args.base, "float32")
        self._models = {slot: make() for slot, make in self._load.items()}
        self._prompts = prompts_of(self._models["base"].text, args.held_out, 1000)
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._memory: list[tuple[int, float]] = []  # requests, KiB

    def case(self, number: int) -> None:
        """Decode one case with three decoders and compare the texts with plain decoding's."""
        rng = random.Random(f"{self._seed}/{number}")
        slot = rng.choice(list(DECODERS))
        model = self._models[slot]
        prompts = rng.sample(self._prompts, rng.choice([1, 1, 1, 2, 4, 8]))
        left = model.context - max(map(len, prompts))
        settings = {
            **vars(rng.choice(list(SAMPLINGS.values()))),
            "max_new_tokens": min(left, rng.choice([13, 20, 60, 150, 400])),
            "stop": rng.choice([[], rng.sample(STOPS, 2)]),
        }
        plain = DecodeConfig("plain", **settings)
        expected = texts_of(model, prompts, plain, batch=1)
        for _ in range(3):
            decode = replace(rng.choice(DECODERS[slot]), **settings)
            steps = rng.choice([None, None, None, rng.randint(1, 12)])
            self.counts["requests"] += 1
            try:
                texts = texts_of(model, prompts, decode, batch=8, steps=steps)
            except Exception:  # any error is a result of the drill
                self.errors.append(f"case {number}: {decode}: {traceback.format_exc()}")
                continue
            for seed, (text, whole) in enumerate(zip(texts, expected)):
                self.counts["texts"] += 1
                if text == (whole if steps is None else whole[: len(text)]):
                    continue
                exact = self._load[slot]().lm.double()
                request = Request(prompts[seed], seed)
                distance = gap(exact, request, whole, text, plain.sampling)
                if distance < NEAR_TIE:
                    self.counts["near-ties"] += 1
                else:
                    self.errors.append(f"case {number}: {decode}: gap {distance}")

    def reload(self, number: int) -> None:
        """Free one model, check that it is gone, and load it again."""
        slot = random.Random(number).choice(list(self._load))
        freed = weakref.ref(self._models.pop(slot).lm)
        gc.collect()
        if freed() is not None:
            self.errors.append(f"case {number}: {slot} is still referenced")
        self._models[slot] = self._load[slot]()

    def sample_memory(self) -> None:
        """Record the number of requests and the private memory of the process."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        memory = psutil.Process().memory_info()
        kib = (memory.rss - memory.shared) / 1024
        self._memory.append((self.counts["requests"], kib))

    def growth(self) -> Any:
        """Return the growth of memory in KiB per request, with its 95 % interval."""
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
