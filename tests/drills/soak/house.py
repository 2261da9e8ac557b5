"""The models that a soak decodes with: loaded, used, and now and then freed and loaded again.

What is learned is kept for so many kinds of sampling and no more, and a tokenizer keeps so many words that it
has split. A model is loaded with these stores full: they would take hours to fill, and their growth could not
be told from that of a leak.
"""

import gc
import random
import string
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from infer import DecodeConfig, DraftConfig, Model, generate, load
from infer.drafters.auto import MOST
from infer.engine.runner import Runners
from infer.text import Text

ATTENTIONS = ("sdpa", "eager")
WORDS = 10_000  # the most of which `tokenizers` keeps the tokens
TEMPERATURES = [3 + number / 100 for number in range(MOST)]  # as many as are kept, and none that a case draws


class House:
    """A model for each slot. `loaded` counts how often any was."""

    def __init__(self, model: str, draft: str, base: str, seed: int) -> None:
        self._rng, self._folder, self.loaded = random.Random(seed), model, 0
        float32 = partial(load, model, "float32", "cpu")
        self._makers: dict[str, Callable[[], Any]] = {
            "draft": partial(float32, draft=draft),
            "adaptive draft": partial(float32, draft=DraftConfig(draft, adaptive=True)),
            "self": lambda: float32(draft=f"self:{self._rng.choice([1, 2])}"),
            "static": lambda: _static(float32(draft=draft)),
            "base": partial(load, base, "float32", "cpu"),
            "bfloat16": partial(load, model, "bfloat16", "cpu", draft=draft),
            "library": lambda: _by_library(model, self._rng.choice(ATTENTIONS)),
        }
        self._texts = dict[str, Text]()
        self._held = {slot: self._load(slot) for slot in self._makers}

    def model(self, slot: str) -> Model:
        """The loaded directory of a slot; of the library's slot the one that says what plain decoding gives."""
        return self._held["draft" if slot == "library" else slot]

    @property
    def lm(self) -> PreTrainedModel:
        """The library's slot."""
        return self._held["library"]

    def rest(self) -> None:
        """Free what the static slot keeps of its last text, up to 24 MiB by its size, which come and go."""
        self._held["static"] = _static(self._held["static"])

    def renew(self) -> str | None:
        """Free one of the models and load it again; its name, where something still held it."""
        slot = self._rng.choice(list(self._makers))
        held = self._held.pop(slot)
        gone = weakref.ref(held if slot == "library" else held.lm)
        del held
        gc.collect()
        leaked = gone() is not None
        self._held[slot] = self._load(slot)
        return slot if leaked else None

    def _load(self, slot: str) -> Any:
        self.loaded += 1
        found = self._makers[slot]()
        if slot == "library":
            _fill_librarys(found, self._folder)
            return found
        if slot not in self._texts:
            _fill_tokenizer(found)
        # `tokenizers` 0.23.3 frees the words of a tokenizer that is gone when the thread ends, and not before.
        found = replace(found, text=self._texts.setdefault(slot, found.text))
        if slot != "base":
            _fill(found)
        return found


def _fill_tokenizer(model: Model) -> None:
    rng = random.Random(0)
    model.text.encode(" ".join("".join(rng.choices(string.ascii_lowercase, k=8)) for _ in range(WORDS)))


def _fill(model: Model) -> None:
    for temperature in TEMPERATURES:
        for method in ("sdsat", *(("gsd",) if model.draft else ())):
            list(generate(model, [20, 30], DecodeConfig(method, temperature=temperature, max_new_tokens=2)))


def _fill_librarys(lm: PreTrainedModel, folder: str) -> None:
    ask = partial(lm.generate, torch.tensor([[20, 30]]), do_sample=True, max_new_tokens=2, pad_token_id=2)
    for temperature in TEMPERATURES:
        ask(temperature=temperature, seed=0, custom_generate=folder, trust_remote_code=True)


def _static(model: Model) -> Model:
    """With forwards of fixed shapes and a runner kept between the texts, as on a GPU."""
    return replace(model, runners=Runners(model.lm, static=True))


def _by_library(folder: str, attention: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    ).eval()
