"""Prompts, settings of decoding and arguments of the library's `generate`, of every value and type.

What decodes is plain decoding's text token for token, alone or in a batch, and a prompt's text reads back as it
was; what does not is refused in a sentence before anything is decoded.
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
from tests.drills.fuzz.command import call
from tests.drills.fuzz.model_directories import costs, refused
from tests.drills.fuzz.tiny import made

COUNT = 2000
NEW = 10
PIECES = (
    *(
        "def f(x):\n",
        "    return x",
        "\t",
        "  \n\n",
        "é",
        "日本語",
        "👩‍👩‍👧",
        "שלום",
        "\u202eabc",
        "e\u0301\u0327",
        "\0",
        "\x7f",
    ),
    *(
        "<s>",
        "</s>",
        "<unk>",
        "▁<PRE>",
        "<PRE>",
        " <SUF>",
        "a▁<MID>b",
        "<EOT>",
        "<adaptive_1>",
        SPACE,
        "<0x41>",
        "<0x",
    ),
    *("\ufeff", "\u2028", "\r", "\x85", "\U0010ffff", "ﬁ", "\u00a0", "\u3000"),
)
METHODS = ("plain", "prompt_lookup", "ngrams", "sdsat", "ssd", "tsd", "gsd")
SETTINGS = (
    "k",
    "sources",
    "probes",
    "nodes",
    "width",
    "tree",
    "depth",
    "theta_prob",
    "theta_sib",
    "tau",
    "draft_rows",
)
CHOICE = ("temperature", "top_p", "top_k", "seed", "max_new_tokens", "min_new_tokens", "repetition_penalty")
FURTHER = ("no_repeat_ngram_size", "stop", "verify", "method")
OWN = ("k", "probes", "seed")  # of custom_generate
LIBRARYS = ("max_new_tokens", "do_sample", "num_beams", "num_return_sequences", "repetition_penalty")
LIBRARYS += ("stop_strings", "eos_token_id", "temperature", "top_k", "top_p", "min_new_tokens", "pad_token_id")


def run(rng: random.Random, folder: Path) -> str:
    """One prompt, batch or call."""
    way = rng.choice((by_text, by_text, by_settings, by_settings, by_batch, by_command, by_library))
    with patch.dict(os.environ, XDG_CACHE_HOME=str(costs())):
        return way(rng, folder)


@functools.cache
def model() -> Model:
    """Of two layers' worth: its own adapter drafts for it."""
    return load(made() / "model", "float32", "cpu", draft=str(made() / "sharded"))


@functools.cache
def lm() -> PreTrainedModel:
    """The same as plain Transformers loads it, with its custom_generate."""
    return AutoModelForCausalLM.from_pretrained(made() / "model", dtype=torch.float32, trust_remote_code=True)


def text(rng: random.Random) -> str:
    """Of pieces that may go wrong beside each other; now and then too long for the context."""
    some = [rng.choice((*PIECES, mutate.text(rng))) for _ in range(rng.choice((0, 1, 2, 3, 8)))]
    return "".join(some) * rng.choice((*8 * (1,), 3, 200))


def by_text(rng: random.Random, folder: Path) -> str:
    """A text, or a middle: read back, then decoded plainly and with drafts."""
    prompt: Any = text(rng)
    if rng.random() < 0.4:
        prompt = Infill(prompt, text(rng), rng.choice(("psm", "spm")))
    try:
        if isinstance(prompt, str):
            read_back(prompt)
        plain = tokens([prompt], DecodeConfig("plain", max_new_tokens=NEW))
    except UserError as error:
        return refused(error)
    method, probes = rng.choice(
        (("sdsat", "root"), ("sdsat", "all"), ("prompt_lookup", "auto"), ("ngrams", "auto"), ("gsd", "auto"))
    )
    assert tokens([prompt], DecodeConfig(method, probes=probes, max_new_tokens=NEW)) == plain
    return "fine"


def read_back(prompt: str) -> None:
    """Its ids are no control ids, and their text is the prompt's."""
    reader = model().text
    ids = reader.encode(prompt)[1:]
    assert model().adaptive and model().adaptive.control, "the model's directory says them"
    assert model().adaptive.control.isdisjoint(ids), f"{prompt!r} became control ids: {ids}"
    assert reader.decode(ids) == prompt, f"{prompt!r} reads back as {reader.decode(ids)!r}"


def by_settings(rng: random.Random, folder: Path) -> str:
    """Any value of one to three settings; drafts change nothing, and a stop string stands at the end alone."""
    given: dict[str, Any] = {"max_new_tokens": NEW}
    given |= rng.choice(({}, {}, {"temperature": 0.8, "seed": rng.randrange(99)}))
    for name in rng.sample((*SETTINGS, *CHOICE, *CHOICE, *FURTHER), rng.choice((1, 1, 2, 3))):
        given[name] = value(name, rng)
    prompt = [rng.randrange(13, 300) for _ in range(rng.choice((1, 5, 60)))]
    try:
        decode = DecodeConfig(**{"method": rng.choice(METHODS), **given})
    except ValueError as error:
        return refused(UserError(str(error)))
    try:
        found = list(generate(model(), prompt, decode))
    except UserError as error:
        return refused(error)
    texts, ids = [one for step in found for one in step.texts], [id for step in found for id in step.tokens]
    assert not any(stop in "".join(texts[:-1]) for stop in decode.stop), f"{texts} goes on behind {decode.stop}"
    assert len(ids) <= decode.max_new_tokens
    if decode.verify == "pick":
        shared = {name: getattr(decode, name) for name in (*CHOICE, "no_repeat_ngram_size", "stop")}
        assert tokens([prompt], DecodeConfig("plain", **shared)) == [ids], f"{given} changed the text"
    return "fine"


def value(name: str, rng: random.Random) -> Any:
    """For a setting: what it may be, something near that, or anything."""
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


def by_batch(rng: random.Random, folder: Path) -> str:
    """Prompts of every kind side by side, empty ones too: each has the text that it has alone."""
    prompts = [_prompt(rng) for _ in range(rng.choice((1, 2, 3, 8, 9)))]
    seeds = rng.choice((None, None, [rng.randrange(2**63) for _ in prompts], mutate.value(rng)))
    decode = DecodeConfig("sdsat", probes="root", max_new_tokens=NEW, temperature=rng.choice((0.0, 1.0)))
    try:
        together = tokens(prompts, decode, seeds)
    except UserError as error:
        return refused(error)
    plain = DecodeConfig("plain", max_new_tokens=NEW, temperature=decode.temperature)
    alone = [
        tokens([one], plain, None if seeds is None else [seed])[0]
        for one, seed in zip(prompts, seeds or [0] * len(prompts), strict=True)
    ]
    assert together == alone, f"together {together}, alone {alone}"
    return "fine"


def _prompt(rng: random.Random) -> Any:
    ids = [rng.randrange(400) for _ in range(rng.choice((1, 3, 40, 500)))]
    strange = [*ids, rng.choice((mutate.number(rng), True, "1", None, 400, -1))]
    usual = (ids, ids, tuple(ids), np.array(ids), torch.tensor(ids), "def f(x):", "def f(x):")
    return rng.choice((*usual, *usual, text(rng), Infill(text(rng), "b"), strange, mutate.value(rng)))


def by_command(rng: random.Random, folder: Path) -> str:
    """`python -m infer`: what it prints is the text that the API gives."""
    prompt, page = text(rng)[:3000], folder / "page.html"
    given = [f"model={made() / 'model'}", "dtype=float32", "device=cpu", f"decode.max_new_tokens={NEW}"]
    given += ["decode=sdsat", "decode.probes=root", f"html={page}"]
    ended = call("infer", [*given, f"prompt={prompt}"], rng)
    if ended.told:
        return "refused"
    wanted = "".join(s.text for s in generate(model(), prompt, DecodeConfig("plain", max_new_tokens=NEW)))
    assert ended.printed == f"{wanted}\n", f"printed {ended.printed!r}, wanted {wanted!r}"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    return "fine"


def by_library(rng: random.Random, folder: Path) -> str:
    """The directory's custom_generate, beside the library's own decoding of the same arguments.

    What is wrong with the library's own arguments it says in its own way, in both.
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
    own: dict[str, Any] = {"probes": "root"}
    for name in rng.sample((*OWN, *OWN, *LIBRARYS), rng.choice((1, 2))):
        (own if name in OWN else given)[name] = value(name, rng)
    torch.manual_seed(0)
    wanted = _outcome(lambda: lm().generate(ids, **given))
    found = _outcome(lambda: lm().generate(ids, **given, **own, custom_generate=str(made() / "model"), **TRUST))
    if isinstance(found, Exception):
        ours = isinstance(found, ValueError)
        assert ours or isinstance(wanted, Exception), f"{type(found).__name__}: {found}"
        return "refused"
    drawn = given["do_sample"] or isinstance(wanted, Exception)
    assert drawn or torch.equal(found, wanted), f"{found.tolist()}, the library {wanted.tolist()}"
    return "fine"


TRUST = {"trust_remote_code": True}


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def tokens(prompts: list[Any], decode: DecodeConfig, seeds: Any = None) -> list[list[int]]:
    """New tokens of each prompt."""
    found = [list[int]() for _ in prompts]
    for step in generate(model(), prompts, decode, seeds=seeds):
        found[step.sequence] += step.tokens
    return found
