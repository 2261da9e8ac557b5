"""Model directories with one file damaged, read by `infer`, by a draft's setting and by plain Transformers.

What a directory says is believed where it can be: another rotary base is another model, and a flipped byte of a
weight cannot be told from the weight. So the oracle is threefold: what decodes at all decodes losslessly,
drafts or none; it is the text of the library's own forward over the same files; and what only says how to
draft, or nothing to the decoder, changes no token.
"""

import functools
import json
import logging
import os
import random
import shutil
import struct
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from conf import UserError
from infer import DecodeConfig, DraftConfig, Model, generate, load
from tests.drills.fuzz import mutate
from tests.drills.fuzz.command import call
from tests.drills.fuzz.tiny import made

COUNT = 2000
NEW = 12
LARGE = 1e6  # no weight of a whole model is near
NEAR = 1e-5  # two logits so alike are a tie, which either order of additions may decide
PROMPTS = ([20, 30, 40, 51], [77, 20, 91])
TEXT = "def f(x):\n    return"
# These say how to draft, or nothing to the decoder.
NO_TOKENS = ("adapter_model.safetensors", "adapter_config.json", "tokenizer_config.json", "manifest.json")
NAMED = {  # what is damaged, as often as it stands here
    "model": 4 * ["adaptive.json"]
    + 3 * ["config.json", "model.safetensors"]
    + 2 * ["tokenizer.json", "generation_config.json"]
    + ["tokenizer_config.json", "manifest.json"],
    "sharded": 2 * ["model.safetensors.index.json"]
    + ["model-00002-of-00003.safetensors", "config.json", "adaptive.json"],
    "gated": 2 * ["adapter/adapter_config.json", "adapter/adapter_model.safetensors", "adaptive.json"],
}
ADAPTIVE = ("adaptive_ids", "L", "gated", "bos", "infilling", "control")


def run(rng: random.Random, folder: Path) -> str:
    """One damaged directory, read in one of the ways."""
    kind = rng.choice(("model", "model", "model", "sharded", "gated"))
    model, name = folder / "model", rng.choice(NAMED[kind])
    left_out = shutil.ignore_patterns("custom_generate", "README.md")
    shutil.copytree(made() / kind, model, ignore=left_out)
    damage(model / name, rng)
    way = rng.choice((*3 * [decoded], by_command, by_command, as_draft))
    with patch.dict(os.environ, XDG_CACHE_HOME=str(costs())):
        return way(model, name, kind, rng)


@functools.cache
def costs() -> Path:
    """The cache folder: what rows cost is measured once."""
    return made() / "costs"


def damage(file: Path, rng: random.Random) -> None:
    """One change of bytes or, where the file has a structure, of that."""
    if rng.random() < 0.04:
        file.unlink()
        return
    data = file.read_bytes()
    if file.suffix == ".safetensors" and rng.random() < 0.7:
        file.write_bytes(_with_header_changed(data, rng))
    elif file.suffix == ".json" and rng.random() < 0.8:
        changed = _changed_adaptive if file.name == "adaptive.json" else mutate.changed_json
        file.write_bytes(changed(data, rng))
    else:
        file.write_bytes(mutate.damaged(data, rng))


def _changed_adaptive(data: bytes, rng: random.Random) -> bytes:
    """Most of the file is a provenance that nobody reads."""
    tree = json.loads(data)
    inner = {name: tree[name] for name in ADAPTIVE if name in tree}
    for _ in range(rng.choice((1, 1, 2))):
        mutate.changed(inner, rng)
    others = {name: value for name, value in tree.items() if name not in ADAPTIVE}
    return json.dumps(others | inner).encode()


def _with_header_changed(data: bytes, rng: random.Random) -> bytes:
    """Lengths, offsets, types, names of a safetensors file; the header's own length is right, or not."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + size], data[8 + size :]
    kind = rng.randrange(4)
    if kind == 0:
        return (
            struct.pack("<Q", rng.choice((0, 1, size - 1, size + 1, 2**32, 2**63, 2**64 - 1))) + header + body
        )
    header = mutate.damaged(header, rng) if kind == 1 else mutate.changed_json(header, rng)
    return struct.pack("<Q", len(header)) + header + body


def decoded(folder: Path, name: str, kind: str, rng: random.Random) -> str:
    """By the API, plainly and with drafts."""
    try:
        model = load(folder, "float32", "cpu")
        plain = texts(model, DecodeConfig("plain", max_new_tokens=NEW))
    except UserError as error:
        return refused(error)
    assert texts(model, DecodeConfig("prompt_lookup", max_new_tokens=NEW)) == plain, (
        "prompt lookup changed a text"
    )
    if model.adaptive and not overflows(model.lm):
        probes = rng.choice(("root", "all"))
        try:
            drafted = texts(model, DecodeConfig("sdsat", max_new_tokens=NEW, probes=probes))
        except UserError as error:
            return refused(error)
        assert drafted == plain, "drafts changed a text"
    if name.rpartition("/")[2] in NO_TOKENS:
        assert plain == untouched(kind), "what says nothing of tokens changed a text"
    wanted = by_library(folder, model)
    assert wanted is None or wanted == plain, f"the library's own forward wrote {wanted}, we {plain}"
    return "fine"


def by_command(folder: Path, name: str, kind: str, rng: random.Random) -> str:
    """By `python -m infer`, from a text."""
    given = [f"prompt={TEXT}", "dtype=float32", "device=cpu", f"decode.max_new_tokens={NEW}"]
    ended = call("infer", [f"model={folder}", *given], rng)
    if not ended.told:
        plain = call("infer", [f"model={folder}", "decode=plain", *given], rng)
        assert plain.printed == ended.printed, f"drafts changed {plain.printed!r} into {ended.printed!r}"
    return ended.outcome


def as_draft(folder: Path, name: str, kind: str, rng: random.Random) -> str:
    """The damaged one drafts for the whole one, whose text it cannot change."""
    adaptive = rng.random() < 0.3
    method = rng.choice(("ssd", "tsd", "gsd"))
    try:
        draft = DraftConfig(str(folder), adaptive=adaptive)
        model = load(made() / "model", "float32", "cpu", draft=draft)
        found = texts(model, DecodeConfig(method, nodes=rng.choice((1, 5)), max_new_tokens=NEW))
    except UserError as error:
        return refused(error)
    assert found == untouched("model"), "a draft model changed a text"
    return "fine"


def overflows(lm: torch.nn.Module) -> bool:
    """Whether a probe's row may be beyond all numbers: nought times that is no number, so that a row which sees
    nothing of it is none either. The one kind of damage that drafts can carry into a text.
    """
    return any(
        not tensor.abs().max() < LARGE for tensor in lm.state_dict().values() if tensor.is_floating_point()
    )


def texts(model: Model, decode: DecodeConfig) -> list[list[int]]:
    """New tokens of the prompts side by side."""
    found = [list[int]() for _ in PROMPTS]
    for step in generate(model, PROMPTS, decode):
        found[step.sequence] += step.tokens
    return found


@functools.cache
def untouched(kind: str) -> list[list[int]]:
    """What the whole directory writes."""
    return texts(load(made() / kind, "float32", "cpu"), DecodeConfig("plain", max_new_tokens=NEW))


def by_library(folder: Path, model: Model) -> list[list[int]] | None:
    """The likeliest tokens by the library's own forward, anew from the prompt for each of them; None where it
    does not read the directory, or has no likeliest."""
    logging.disable()
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except Exception:
        return None
    finally:
        logging.disable(logging.NOTSET)
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW):
            with torch.inference_mode():
                logits = lm(torch.tensor([ids])).logits[0, -1]
            first, second = logits.topk(2).values
            if not logits.isfinite().all() or first - second <= NEAR * first.abs():
                return None
            ids.append(int(logits.argmax()))
            if ids[-1] in model.eos:
                break
        found.append(ids[len(prompt) :])
    return found


def refused(error: UserError) -> str:
    """A refusal is one line that says something."""
    told = str(error)
    said = [word for word in (" found ", " got ") if word in f"{told} "]
    assert "\n" not in told and said and not told.rstrip().endswith(("found", "got")), repr(told)
    return "refused"
