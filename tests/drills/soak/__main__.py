"""A soak: hours of mixed decoding in one process, every text held against plain decoding, and memory watched.

    python -m tests.drills.soak MODEL_DIR HELD_OUT.jsonl --draft DRAFT_DIR --base BASE_DIR
        [--minutes 120] [--seed 0] [--only N]

MODEL_DIR has adaptive tokens and the decoder of custom_generate/, DRAFT_DIR adaptive tokens too, BASE_DIR none;
they share a tokenizer. Every case (cases.py) is drawn from the seed and its number: which of the loaded models,
1 to 8 prompts of mixed lengths, sampling, processors and stops, and three ways there: decoders, and callers who
listen to the end, go away, or fail in the middle. In between requests are refused, and models freed and loaded
again.

What is compared is said in ways.py, and what counts as growth in memory.py. Differences in bfloat16 are told,
and are no failure. A line a minute; Ctrl-C ends it with the result so far; the last line is JSON, and the exit
code 1 where a text differs or memory grows. `--only N` repeats the case N, with models that have decoded
nothing before.
"""

import os

# PyTorch's libraries keep the kernels of a thousand shapes in bfloat16: 0.6 GiB of a CPU's memory, filled up
# over hours. A few are enough here, and what we hold ourselves shows. Read when PyTorch is imported.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
os.environ.setdefault("LRU_CACHE_CAPACITY", "16")  # ideep's

import argparse
import json
import random
import signal
import sys
import time
from dataclasses import asdict, astuple, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch

from infer.models.checkpoint import load_model
from tests.drills.soak.cases import Case, Source, draw
from tests.drills.soak.house import House
from tests.drills.soak.memory import Sample, large_apart, sample, verdict
from tests.drills.soak.refusals import refused
from tests.drills.soak.ways import Found, run

EVERY = 4  # cases between two samples
REFUSED, RENEWED = 0.3, 0.02  # of all cases, behind them


@dataclass
class Tally:
    """What was done so far, and what was wrong."""

    cases: int = 0
    requests: int = 0
    texts: int = 0
    tokens: int = 0
    refused: int = 0
    near_ties: list[float] = field(default_factory=list)
    narrow: dict[str, int] = field(default_factory=lambda: {"texts": 0, "differ": 0})
    ways: dict[str, int] = field(default_factory=dict)
    endings: dict[str, int] = field(default_factory=dict)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def add(self, number: int, case: Case, found: Found) -> None:
        """One way of a case."""
        self.requests += 1 if found.way.ending != "beside" else 2
        self.texts, self.tokens = self.texts + found.texts, self.tokens + found.tokens
        for counts, what in ((self.ways, found.way.name), (self.endings, found.way.ending)):
            counts[what] = counts.get(what, 0) + 1
        self.near_ties += found.gaps
        if case.slot == "bfloat16" and not any("Traceback" in told for told in found.wrong):
            self.narrow["texts"] += found.texts
            self.narrow["differ"] += len(found.wrong) + len(found.gaps)
            return
        for told in found.wrong:
            self.fail(number, f"{case.slot}: {found.way}: {told}")

    def fail(self, number: int, told: str) -> None:
        """Says so at once."""
        self.wrong.append({"case": number, "told": told})
        print(f"WRONG case {number}: {told}", flush=True)


class Soak:
    """A process's models and what came of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._began, self._ended = args, time.monotonic(), False
        self._rng = random.Random(args.seed)
        self.house = House(args.model, args.draft, args.base, args.seed)
        self._exact = load_model(args.model, dtype="float64", device="cpu")
        # Tuples of numbers, which the collector does not follow: as objects these notes would be growth.
        self.tally, self._noted = Tally(), list[tuple[Any, ...]]()
        model = self.house.model("draft")
        self._source = Source.of(model.text, args.held_out, model.context, self._exact.config.vocab_size)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    @property
    def samples(self) -> list[Sample]:
        """So far."""
        return [Sample(*noted) for noted in self._noted]

    def end(self, *_: Any) -> None:
        """With this case."""
        self._ended = True

    def case(self, number: int) -> None:
        """All its ways."""
        case = draw(self._args.seed, number, self._source)
        self.tally.cases += 1
        self.tally.requests += len(case.prompts)  # plain, each alone
        try:
            for found in run(case, self.house, self._exact, self._args.model):
                self.tally.add(number, case, found)
        except Exception as error:  # plain decoding itself: it is the drill's find
            self.tally.fail(number, f"{case.slot}: {type(error).__name__}: {error}")

    def between(self, number: int) -> None:
        """A refusal now and then, a model freed, a sample."""
        if self._rng.random() < REFUSED:
            self.tally.refused += 1
            if told := refused(self._rng, self.house, self._args.model):
                self.tally.fail(number, told)
        if self._rng.random() < RENEWED and (slot := self.house.renew()):
            self.tally.fail(number, f"{slot}: still held by somebody when it was freed")
        if number % EVERY == 0:
            self.house.rest()
            self._noted.append(astuple(sample(self.seconds, self.tally.requests)))

    def run(self) -> None:
        """Until the time is up."""
        minute = 0
        for number in count():
            self.case(number)
            self.between(number)
            if self.seconds // 60 > minute:
                minute = int(self.seconds // 60)
                self._tell(minute)
            if self._ended or self.seconds > 60 * self._args.minutes:
                return

    def _tell(self, minute: int) -> None:
        tally, samples = self.tally, self.samples
        last, found = samples[-1], verdict(samples).get("slopes", {})
        told = {what: "{:+.2f} ({:+.2f} to {:+.2f})".format(*slope) for what, slope in found.items()}
        done = f"{tally.cases} cases, {tally.texts} texts, {tally.tokens} tokens"
        wrong = f"{len(tally.wrong)} wrong, {len(tally.near_ties)} near-ties"
        held = f"{last.kib / 1024:.1f} MiB, {told.get('kib', 'yet unknown')} KiB a request"
        objects = f"{last.objects} objects, {told.get('objects', 'yet unknown')} a request"
        counts = f"{objects}, {last.files} files, {last.threads} threads"
        print(f"{minute:4} min  {done}; {wrong}; {held}; {counts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--base", required=True)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    large_apart()
    soak = Soak(args)
    signal.signal(signal.SIGINT, soak.end)
    if args.only is None:
        soak.run()
    else:
        soak.case(args.only)
    memory = verdict(soak.samples)
    told = {**asdict(soak.tally), "loaded": soak.house.loaded, "minutes": soak.seconds / 60, "seed": args.seed}
    print(json.dumps({**told, "torch": torch.__version__, "memory": memory}))
    sys.exit(bool(soak.tally.wrong or memory["grows"]))


if __name__ == "__main__":
    main()
