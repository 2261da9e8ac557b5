"""Peers: the library's own decoding of the same model, as decoders beside ours.

    generate                   one token a forward
    generate prompt lookup     10 drafts are copied from behind an earlier n-gram, n up to 2 (Saxena, 2023)
    generate assisted          the draft model drafts a chain (Leviathan et al., 2022) as the library has it by
                               default: up to 20 tokens, fewer where it is less than 0.4 sure of one

With the library's own attention and cache, in shapes as they come. Greedy they give the tokens of plain
decoding, up to near-ties, of which our own picks look again in float32. Sampled they draw from the same
distribution with other random numbers, and so they give other texts.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from conf.clock import duration
from infer.benchmarks.prompts import TokenPrompt
from infer.engine.sampling import Sampling
from infer.measure.runs import Decoder, Run, clock, seed_of
from infer.methods import LOOKED_UP
from infer.models.checkpoint import eos_ids
from infer.models.draft import STAND_IN, Draft

GENERATE, LOOKUP, ASSISTED = "generate", "generate prompt lookup", "generate assisted"


def peer_decoders(
    lm: PreTrainedModel,
    draft: Draft | None,
    *,
    sampling: Sampling,
    max_new_tokens: int,
    capacity: int,
    seed: int = 0,
) -> tuple[dict[str, Decoder], dict[str, str]]:
    """The library's decoders by name, for texts of up to `capacity` tokens; and of those that cannot be, why.

    Prompts are drawn for by `seed_of` them.
    """

    def decoder(draft: Draft | None = None, **settings: Any) -> Decoder:
        settings |= {"max_new_tokens": max_new_tokens, **_sampled(sampling)}
        return lambda prompt: _run(lm, draft, prompt, settings, seed_of(prompt, seed))

    found = {GENERATE: decoder(), LOOKUP: decoder(prompt_lookup_num_tokens=LOOKED_UP)}
    if draft is None:
        return found, {ASSISTED: "wanted a draft model, found none"}
    if draft.context < capacity:
        told = f"wanted a draft model of {capacity} positions, found {draft.context}"
        return found, {ASSISTED: told}
    return found | {ASSISTED: decoder(draft)}, {}


def _sampled(sampling: Sampling) -> dict[str, Any]:
    if not sampling.temperature:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }


def _run(
    lm: PreTrainedModel, draft: Draft | None, prompt: TokenPrompt, settings: dict[str, Any], seed: int
) -> Run:
    ends = sorted(eos_ids(lm) | prompt.ends)
    if prompt.max_new_tokens:
        settings = settings | {"max_new_tokens": prompt.max_new_tokens}
    config = GenerationConfig(**settings, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0)
    ids = torch.tensor([prompt.ids], device=lm.device)
    with _as_the_library_has_it(lm), ExitStack() as stack:
        assistant = stack.enter_context(_assistant(draft, lm)) if draft else None
        torch.manual_seed(seed)
        began, heard = clock(), Streamer()
        with _counted(lm) as fed:
            lm.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=heard,
                assistant_model=assistant,
            )
        seconds = duration(began, clock())
    return _told(heard, fed, len(prompt.ids), began=began, seconds=seconds)


def _told(heard: "Streamer", fed: list[int], prompt: int, *, began: float, seconds: float) -> Run:
    """Every forward is a step. The first has the prompt's rows, of which the last one alone counts."""
    rows = [fed[0] - prompt + 1, *fed[1:]]
    return Run(
        [token for step in heard.steps for token in step],
        seconds,
        len(rows),
        sum(rows) - len(rows),
        sum(len(step) - 1 for step in heard.steps),
        first_seconds=heard.first - began,
        first_tokens=len(heard.steps[0]),
        rows=sum(rows),
        verifications=sum(row > 1 for row in rows),
        levels=sum(rows) - len(rows),
        depths=tuple(row - 1 for row in rows),
        accepts=tuple(len(step) - 1 for step in heard.steps),
    )


class Streamer(BaseStreamer):
    """The tokens of each step, and when the first were there; the library hands over the prompt before them."""

    def __init__(self) -> None:
        self.first = 0.0
        self.steps: list[list[int]] = []
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """Tokens, already on the host: what they waited for is done."""
        if self._prompt:
            self._prompt = False
            return
        self.first = self.first or time.perf_counter()
        self.steps.append(value.flatten().tolist())

    def end(self) -> None:
        """The text is over."""


@contextmanager
def _counted(lm: PreTrainedModel) -> Iterator[list[int]]:
    """The rows of each forward."""
    fed = list[int]()

    def count(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        fed.append(kwargs["input_ids"].shape[1])

    with _hooked(lm.register_forward_pre_hook, count):
        yield fed


@contextmanager
def _as_the_library_has_it(lm: PreTrainedModel) -> Iterator[None]:
    """With none of a directory's generation settings, such as penalties: our loop has none."""
    settings, verbosity = lm.generation_config, logging.get_verbosity()
    lm.generation_config = GenerationConfig()
    logging.set_verbosity_error()  # it warns of how its own code calls itself
    try:
        yield
    finally:
        lm.generation_config = settings
        logging.set_verbosity(verbosity)


@contextmanager
def _assistant(draft: Draft, target: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The draft model with the target's vocabulary, which the library wants, or else goes by way of texts: of
    ids that it does not have the logits are -inf, and its stand-in is read for them.
    """
    lm, wanted = draft.lm, target.config.vocab_size
    own = lm.config.vocab_size

    def read(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = kwargs["input_ids"]
        return args, {**kwargs, "input_ids": ids.masked_fill(ids >= draft.rows, STAND_IN)}

    def widen(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        output.logits = F.pad(output.logits, (0, wanted - output.logits.shape[-1]), value=float("-inf"))
        return output

    with ExitStack() as stack:
        stack.enter_context(_as_the_library_has_it(lm))
        if draft.rows < wanted:
            stack.enter_context(_hooked(lm.register_forward_pre_hook, read))
            stack.enter_context(_hooked(lm.register_forward_hook, widen))
        lm.config.vocab_size = wanted
        stack.callback(setattr, lm.config, "vocab_size", own)
        yield lm


@contextmanager
def _hooked(register: Callable[..., Any], hook: Callable[..., Any]) -> Iterator[None]:
    handle = register(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
