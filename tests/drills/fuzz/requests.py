"""Prompts, settings of decoding and arguments of the library's `generate`, of every value and type.

What decodes is the text of plain decoding token for token, alone or in a batch, and a prompt reads back as it
was. Everything else is refused in a sentence before it is decoded.
"""

import functools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from conf import UserError
from conf.encoding import SPACE
from infer import DecodeConfig, Infill, Model, generate, load
from tests.drills.fuzz import mutate
from tests.drills.fuzz.setup import call, demo, refused

COUNT = 2000
NEW = 10
PIECES = [
    "def f(x):\n",
    "    return x",
    "\t",
    "  \n\n",
    "é",
    "日本語",
    "👩‍👩‍👧",
    "שלום",
    "\u202eabc",
    "\0",
    "\x7f",
]
PIECES += ["e\u0301\u0327", "\ufeff", "\u2028", "\r", "\x85", "\U0010ffff", "ﬁ", "\u00a0", "\u3000", SPACE]
PIECES += [
    "<s>",
    "</s>",
    "<unk>",
    "▁<PRE>",
    "<PRE>",
    " <SUF>",
    "a▁<MID>b",
    "<EOT>",
    "<adaptive_1>",
    "<0x41>",
    "<0x",
]
METHODS = ("plain", "prompt_lookup", "ngrams", "sdsat", "ssd", "tsd", "gsd")
DRAFTING = ["k", "sources", "probes", "nodes", "width", "tree", "depth", "theta_prob", "theta_sib", "tau"]
DRAFTING += ["draft_rows", "verify", "method"]
CHOOSING = ["temperature", "top_p", "top_k", "seed", "max_new_tokens", "min_new_tokens", "repetition_penalty"]
CHOOSING += ["no_repeat_ngram_size", "stop"]  # the settings that change a text
OURS = ("k", "probes", "seed")  # of custom_generate
LIBRARYS = ["max_new_tokens", "do_sample", "num_beams", "num_return_sequences", "repetition_penalty", "top_k"]
LIBRARYS += ["stop_strings", "eos_token_id", "temperature", "top_p", "min_new_tokens", "pad_token_id"]


def run(rng: random.Random, folder: Path) -> str:
    kinds = (from_text, from_text, with_settings, with_settings, in_batch, by_command, by_library)
    with patch.dict(os.environ, XDG_CACHE_HOME=str(demo() / "costs")):
        try:
            return rng.choice(kinds)(rng, folder)
        except UserError as refusal:
            return refused(refusal)


@functools.cache
def model() -> Model:
    return load(demo() / "model", "float32", "cpu", draft=str(demo() / "sharded"))


@functools.cache
def lm() -> PreTrainedModel:
    """Return the same as plain Transformers loads it, with its custom_generate."""
    return AutoModelForCausalLM.from_pretrained(demo() / "model", dtype=torch.float32, trust_remote_code=True)


def tokens(prompts: list[Any], method: str, seeds: Any = None, **settings: Any) -> list[list[int]]:
    rows = [list[int]() for _ in prompts]
    decode = DecodeConfig(**{"method": method, "max_new_tokens": NEW, **settings})
    for step in generate(model(), prompts, decode, seeds=seeds):
        rows[step.sequence] += step.tokens
    return rows


def text(rng: random.Random) -> str:
    """Return pieces that may go wrong beside each other; now and then too many for the context."""
    pieces = [rng.choice((*PIECES, mutate.text(rng))) for _ in range(rng.choice((0, 1, 2, 3, 8)))]
    return "".join(pieces) * rng.choice((*8 * (1,), 3, 200))


def from_text(rng: random.Random, folder: Path) -> str:
    """Read a text or an infilling back, then decode it plainly and with drafts."""
    prompt: Any = text(rng)
    if rng.random() < 0.4:
        prompt = Infill(prompt, text(rng), rng.choice(("psm", "spm")))
    else:
        reader, adaptive = model().text, model().adaptive
        ids = reader.encode(prompt)[1:]
        assert adaptive and adaptive.control and adaptive.control.isdisjoint(ids), (
            f"{prompt!r}: control ids {ids}"
        )
        assert reader.decode(ids) == prompt, f"{prompt!r} reads back as {reader.decode(ids)!r}"
    drafted = rng.choice((("sdsat", "root"), ("sdsat", "all"), ("prompt_lookup", "auto"), ("gsd", "auto")))
    assert tokens([prompt], drafted[0], probes=drafted[1]) == tokens([prompt], "plain")
    return "fine"


def with_settings(rng: random.Random, folder: Path) -> str:
    """Decode with one to three settings of any value: drafts change nothing, stop strings end a text."""
    given: dict[str, Any] = {"method": rng.choice(METHODS), "max_new_tokens": NEW}
    given |= rng.choice(({}, {}, {"temperature": 0.8, "seed": rng.randrange(99)}))
    for name in rng.sample((*DRAFTING, *CHOOSING, *CHOOSING[:7]), rng.choice((1, 1, 2, 3))):
        given[name] = value(name, rng)
    prompt = [rng.randrange(13, 300) for _ in range(rng.choice((1, 5, 60)))]
    try:
        decode = DecodeConfig(**given)
    except ValueError as error:
        return refused(UserError(str(error)))
    steps = list(generate(model(), prompt, decode))
    texts, ids = [item for step in steps for item in step.texts], [id for step in steps for id in step.tokens]
    assert not any(stop in "".join(texts[:-1]) for stop in decode.stop), f"{texts} goes on behind {decode.stop}"
    assert len(ids) <= decode.max_new_tokens
    if decode.verify == "pick":
        choosing = {name: getattr(decode, name) for name in CHOOSING}
        assert tokens([prompt], "plain", **choosing) == [ids], f"{given} changed the text"
    return "fine"


def value(name: str, rng: random.Random) -> Any:
    """Return what a setting may be, something near that, or anything."""
    likely: dict[str, Callable[[], Any]] = {
        "probes": lambda: rng.choice(("auto", "root", "all", "3", 2, "0", "-1", "1e3", "٣")),
        "tree": lambda: "paper",
        "sources": lambda: rng.sample(("adaptive", "text", "ngrams", "text"), rng.randrange(4)),
        "verify": lambda: "ratio",
        "method": lambda: rng.choice((*METHODS, None, "PLAIN", "")),
        "stop": lambda: [text(rng)[: rng.choice((1, 2, 50))] for _ in range(rng.randrange(1, 4))],
        "max_new_tokens": lambda: rng.choice((1, 2, 30, 10**9)),
        "seed": lambda: rng.choice((0, 1, 2**63 - 1, 2**63)),
    }
    if rng.random() < 0.4:
        return mutate.value(rng)
    return likely.get(name, lambda: mutate.number(rng))()


def in_batch(rng: random.Random, folder: Path) -> str:
    """Decode prompts of every kind side by side, empty ones too: each has the text that it has alone."""
    prompts = [_prompt(rng) for _ in range(rng.choice((1, 2, 3, 8, 9)))]
    seeds = rng.choice((None, None, [rng.randrange(2**63) for _ in prompts], mutate.value(rng)))
    temperature = rng.choice((0.0, 1.0))
    together = tokens(prompts, "sdsat", seeds, probes="root", temperature=temperature)
    for n, prompt in enumerate(prompts):
        alone = tokens([prompt], "plain", seeds and [seeds[n]], temperature=temperature)
        assert together[n] == alone[0], f"prompt {n}: together {together[n]}, alone {alone[0]}"
    return "fine"


def _prompt(rng: random.Random) -> Any:
    ids = [rng.randrange(400) for _ in range(rng.choice((1, 3, 40, 500)))]
    strange = [*ids, rng.choice((mutate.number(rng), True, "1", None, 400, -1))]
    usual = (ids, ids, tuple(ids), np.array(ids), torch.tensor(ids), "def f(x):", "def f(x):")
    return rng.choice((*usual, *usual, text(rng), Infill(text(rng), "b"), strange, mutate.value(rng)))


def by_command(rng: random.Random, folder: Path) -> str:
    """Check that `python -m infer` prints the text that the API gives."""
    prompt, page = text(rng)[:3000], folder / "page.html"
    arguments = [f"model={demo() / 'model'}", "dtype=float32", "device=cpu", f"decode.max_new_tokens={NEW}"]
    arguments += ["decode=sdsat", "decode.probes=root", f"html={page}", f"prompt={prompt}"]
    result = call("infer", arguments, rng)
    if result.refusal:
        return "refused"
    plain = DecodeConfig("plain", max_new_tokens=NEW)
    assert result.stdout == "".join(step.text for step in generate(model(), prompt, plain)) + "\n"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    return "fine"


def by_library(rng: random.Random, folder: Path) -> str:
    """Call custom_generate beside the library's own decoding with the same arguments.

    The library refuses its own arguments in its own words, in both.
    """
    rows = [[rng.randrange(13, 300) for _ in range(rng.choice((1, 4)))] for _ in range(rng.choice((1, 1, 2)))]
    longest = max(map(len, rows))
    ids = torch.tensor([[1] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    given: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": NEW,
        "do_sample": False,
        "pad_token_id": 1,
    }
    ours: dict[str, Any] = {"probes": "root"}
    for name in rng.sample((*OURS, *OURS, *LIBRARYS), rng.choice((1, 2))):
        (ours if name in OURS else given)[name] = value(name, rng)
    torch.manual_seed(0)
    theirs = _result(lambda: lm().generate(ids, **given))
    ours |= {"custom_generate": str(demo() / "model"), "trust_remote_code": True}
    actual = _result(lambda: lm().generate(ids, **given, **ours))
    if isinstance(actual, Exception):
        assert isinstance(actual, ValueError) or isinstance(theirs, Exception), (
            f"{type(actual).__name__}: {actual}"
        )
        return "refused"
    if not given["do_sample"] and not isinstance(theirs, Exception):
        assert torch.equal(actual, theirs), f"{actual.tolist()}, the library {theirs.tolist()}"
    return "fine"


def _result(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        return error
