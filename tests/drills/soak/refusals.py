"""Requests that cannot be, each refused in a sentence; what they leave behind would show as well."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from conf import UserError
from infer import DecodeConfig, Infill, Model, generate, load
from tests.drills.soak.house import House


def refused(rng: random.Random, house: House, folder: str) -> str | None:
    """One of them, in between; what came instead where it was not refused."""
    model, base = house.model("draft"), house.model("base")
    name, ask = rng.choice([*_requests(model, base).items(), *_of_library(house, folder).items()])
    try:
        ask()
    except (UserError, ValueError) as error:
        return None if str(error).strip() else f"{name}: refused without a word"
    except Exception as error:  # of any kind: it is the drill's find
        return f"{name}: {type(error).__name__}: {error}"
    return f"{name}: it was done"


def _requests(model: Model, base: Model) -> dict[str, Callable[[], Any]]:
    context = model.context
    ask = partial(generate, model)
    return {
        "k=0": lambda: DecodeConfig("sdsat", k=0),
        "a tree for auto": lambda: DecodeConfig("sdsat", nodes=5),
        "ratio, greedy": lambda: DecodeConfig("gsd", verify="ratio"),
        "no prompts": lambda: ask([]),
        "nine prompts": lambda: ask(["a"] * 9),
        "an empty prompt": lambda: ask(""),
        "an empty infill": lambda: ask(Infill()),
        "half a character": lambda: ask("\ud800"),
        "an id beyond": lambda: ask([1, 10**6]),
        "a float id": lambda: ask([1.5]),
        "a long prompt": lambda: ask([20] * context),
        "a long text": lambda: ask("a", DecodeConfig(max_new_tokens=context)),
        "k beyond the context": lambda: ask(
            [20] * (context - 3), DecodeConfig("sdsat", k=9, probes="root", max_new_tokens=3)
        ),
        "seeds of another number": lambda: ask(["a", "b"], seeds=[1]),
        "no adaptive tokens": lambda: generate(base, "a", DecodeConfig("sdsat")),
        "no draft model": lambda: generate(base, "a", DecodeConfig("gsd")),
        "no infilling": lambda: generate(base, Infill("a", "b")),
        "no such model": lambda: load("no such model"),
        "no such dtype": lambda: load("no such model", "float8"),
        "no such draft": lambda: load("no such model", draft="self:0"),
    }


def _of_library(house: House, folder: str) -> dict[str, Callable[[], Any]]:
    ask = partial(
        house.lm.generate,
        torch.tensor([[20, 30]]),
        max_new_tokens=5,
        pad_token_id=2,
        custom_generate=folder,
        trust_remote_code=True,
    )
    return {
        "beams": lambda: ask(num_beams=2),
        "scores": lambda: ask(output_scores=True, return_dict_in_generate=True),
        "k of another type": lambda: ask(k="3"),
        "probes by another name": lambda: ask(probes="some"),
        "a text beyond the context": lambda: ask(max_new_tokens=5000),
    }
