"""Peers: Transformers' own decoding of the same model, as decoders beside ours.

    generate                   one token a forward
    prompt_lookup              10 drafts are copied from behind an earlier n-gram, n up to 2 (Saxena, 2023)
    assisted                   the draft model drafts a chain (Leviathan et al., 2022) as the library has it by
                               default: up to 20 tokens, fewer where it is less than 0.4 sure of one

With the library's own attention and cache, in shapes as they come. Greedy they give the tokens of plain
decoding, up to near-ties, of which our own picks look again in float32. Sampled they draw from the same
distribution with other random numbers, and so they give other texts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from infer.api import Model
from infer.bench.prompts import Prompt
from infer.config import DecodeConfig
from infer.drafters.source_methods import LOOKED_UP
from infer.engine.runner import duration
from infer.models.draft import STAND_IN, Draft

GENERATE = "generate"
LOOKUP = "prompt_lookup"
ASSISTED = "assisted"
Generated = Callable[
    [Prompt, int], dict[str, Any]
]  # of a prompt and a seed: the fields of a Run


def peer_decoders(
    model: Model, decode: DecodeConfig, names: Sequence[str]
) -> dict[str, Generated]:
    """Return the library's decoders of these names; the draft model's where there is one."""
    settings: dict[str, Any] = {
        "max_new_tokens": decode.max_new_tokens,
        "do_sample": decode.temperature > 0,
    }
    if decode.temperature:
        settings |= {
            "temperature": decode.temperature,
            "top_k": decode.top_k,
            "top_p": decode.top_p,
        }
    peers: dict[str, Generated] = {
        GENERATE: lambda prompt, seed: _run(model, None, prompt, settings, seed),
        LOOKUP: lambda prompt, seed: _run(
            model,
            None,
            prompt,
            settings | {"prompt_lookup_num_tokens": LOOKED_UP},
            seed,
        ),
    }
    if model.draft:
        peers[ASSISTED] = lambda prompt, seed: _run(
            model, model.draft, prompt, settings, seed
        )
    return {name: peers[name] for name in names if name in peers}


def _run(
    model: Model,
    draft: Draft | None,
    prompt: Prompt,
    settings: dict[str, Any],
    seed: int,
) -> dict[str, Any]:
    """Decode a prompt. A forward is a step; of the first, which has the whole prompt, the last row counts."""
    ends = sorted(model.eos | model.text.ends(prompt.ids))
    config = GenerationConfig(
        **settings, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0
    )
    ids = torch.tensor([prompt.ids], device=model.lm.device)
    streamer = _Streamer()
    rows: list[int] = []

    def count(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        rows.append(kwargs["input_ids"].shape[1])

    lm: Any = model.lm
    with _without_generation_settings(lm), ExitStack() as stack:
        assistant = stack.enter_context(_assistant(draft, lm)) if draft else None
        torch.manual_seed(seed)
        began = time.perf_counter()
        with lm.register_forward_pre_hook(count, with_kwargs=True):
            lm.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=streamer,
                assistant_model=assistant,
            )
        seconds = duration(began, time.perf_counter())
    rows[0] -= len(prompt.ids) - 1
    accepts = [len(step) - 1 for step in streamer.steps]
    drafted = sum(rows) - len(rows)
    deepest = max([*accepts, 0])
    return {
        "tokens": [token for step in streamer.steps for token in step],
        "seconds": seconds,
        "first_seconds": streamer.first - began,
        "forwards": len(rows),
        "rows": sum(rows),
        "verifications": sum(row > 1 for row in rows),
        "drafted": drafted,
        "accepted": sum(accepts),
        "reached": [
            sum(row > at + 1 and done >= at for row, done in zip(rows, accepts))
            for at in range(deepest)
        ],
        "right": [sum(done > at for done in accepts) for at in range(deepest)],
    }


class _Streamer(BaseStreamer):
    """The tokens of each step, and when the first were there; the library hands over the prompt before them."""

    def __init__(self) -> None:
        self.first = 0.0
        self._steps: list[list[int]] = []

    @property
    def steps(self) -> list[list[int]]:
        return self._steps[1:]

    def put(self, value: Tensor) -> None:
        """Record tokens, already on the host: what they waited for is done."""
        if self._steps:
            self.first = self.first or time.perf_counter()
        self._steps.append(value.flatten().tolist())

    def end(self) -> None:
        pass


@contextmanager
def _without_generation_settings(lm: PreTrainedModel) -> Iterator[None]:
    """Decode with none of a directory's generation settings, such as penalties: our loop has none."""
    settings = lm.generation_config
    verbosity = logging.get_verbosity()
    lm.generation_config = GenerationConfig()
    logging.set_verbosity_error()  # it warns of how its own code calls itself
    try:
        yield
    finally:
        lm.generation_config = settings
        logging.set_verbosity(verbosity)


@contextmanager
def _assistant(draft: Draft, target: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Give the draft model the target's vocabulary while the block lasts, as the library requires.

    Ids that it does not have get logits of -inf, and are read as its stand-in.
    """
    lm = draft.lm
    width = target.config.vocab_size
    own = lm.config.vocab_size

    def read(
        module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        ids = kwargs["input_ids"]
        return args, {
            **kwargs,
            "input_ids": ids.masked_fill(ids >= draft.rows, STAND_IN),
        }

    def widen(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        output.logits = F.pad(
            output.logits, (0, width - output.logits.shape[-1]), value=float("-inf")
        )
        return output

    with ExitStack() as stack:
        stack.enter_context(_without_generation_settings(lm))
        if draft.rows < width:
            stack.enter_context(lm.register_forward_pre_hook(read, with_kwargs=True))
            stack.enter_context(lm.register_forward_hook(widen, with_kwargs=True))
        lm.config.vocab_size = width
        stack.callback(setattr, lm.config, "vocab_size", own)
        yield lm
