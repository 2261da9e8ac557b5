"""Peers: the decoders of Transformers on the same model.

    generate        one token per forward
    prompt_lookup   10 drafts, copied from after an earlier n-gram of the text (Saxena, 2023)
    assisted        a chain of drafts from the draft model (Leviathan et al., 2022), with the
                    library's defaults

They use the library's own attention and cache. Greedy texts equal plain decoding's up to
near-ties. Sampled texts differ, because the peers draw other random numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from conf.console import print_once
from infer.api import Model
from infer.bench.prompts import Prompt
from infer.bench.runs import Decoder, Run, seed_of
from infer.bench.timing import Shape, StepClock
from infer.config import DecodeConfig
from infer.engine.runner import TICK

#: The number of drafts in a row of prompt lookup, as in decode=prompt_lookup.
LOOKUP_TOKENS = 10


def peer_decoders(
    model: Model, decode: DecodeConfig, names: Sequence[str], seed: int
) -> dict[str, Decoder]:
    """Return the peers with these names.

    `assisted` is left out without a draft model with the target's vocabulary. Like plain
    decoding, the peers apply the logits processors of the model's generation_config.json and
    no other setting of it. All are left out for a model with stop strings, which would not end
    their texts.
    """
    if names and model.generation.stop:
        print_once(
            "bench: speed.peers left out: the model has stop_strings, which end the texts of this "
            "project's decoders only",
            error=True,
        )
        return {}
    logging.set_verbosity_error()  # otherwise `generate` logs warnings about these calls
    model.lm.generation_config = GenerationConfig()
    if model.draft:
        model.draft.lm.generation_config = GenerationConfig()
    settings: dict[str, Any] = {
        "do_sample": decode.temperature > 0,
        "max_new_tokens": decode.max_new_tokens,
        **model.generation.processed,
    }
    if decode.temperature:
        settings |= vars(decode.sampling)
    peers = {
        "generate": _peer(model, settings, seed),
        "prompt_lookup": _peer(
            model, settings | {"prompt_lookup_num_tokens": LOOKUP_TOKENS}, seed
        ),
    }
    if model.draft and model.draft.rows >= model.lm.config.vocab_size:
        peers["assisted"] = _peer(model, settings, seed, assistant=model.draft.lm)
    return {name: peers[name] for name in names if name in peers}


def _peer(
    model: Model,
    settings: Mapping[str, Any],
    seed: int,
    assistant: PreTrainedModel | None = None,
) -> Decoder:
    """Return a function that decodes a prompt by `generate` with these settings."""
    lm: Any = model.lm

    def run(prompt: Prompt) -> Run:
        ends = sorted(model.eos | model.text.ends(prompt.ids))
        limit = prompt.max_new_tokens or settings["max_new_tokens"]
        limited = {**settings, "max_new_tokens": limit}
        config = GenerationConfig(
            **limited, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0
        )
        ids = torch.tensor([prompt.ids], device=lm.device)
        torch.manual_seed(seed_of(prompt, seed))
        streamer = _Streamer()
        hook = lm.register_forward_pre_hook(streamer.count_rows, with_kwargs=True)
        try:
            lm.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=streamer,
                assistant_model=assistant,
            )
        finally:
            hook.remove()
        return streamer.run(drafting=assistant is not None)

    return run


class _Streamer(BaseStreamer):
    """Collects the tokens, rows and times of each step. The library first puts the prompt."""

    def __init__(self) -> None:
        self._steps: list[list[int]] = []
        self._rows: list[int] = []
        self._clock = StepClock()

    def count_rows(self, lm: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Record the number of rows of a forward."""
        self._rows.append(kwargs["input_ids"].shape[1])

    def put(self, value: Tensor) -> None:
        """Add the tokens of a step, a tensor on the host."""
        if self._steps:
            self._clock.stamp()
        self._steps.append(value.flatten().tolist())

    def end(self) -> None:
        self._clock.stamp_end()

    def run(self, *, drafting: bool) -> Run:
        """Return the run. With `drafting` the draft model has a forward for each draft."""
        steps = self._steps[1:]
        # On a GPU the library may start one forward more than the steps that it returns.
        rows = self._rows[: len(steps)]
        times = self._clock.times([Shape((n - 1) * drafting, 0, n) for n in rows])
        return Run(
            tokens=[token for step in steps for token in step],
            seconds=max(TICK, self._clock.seconds),
            first_seconds=self._clock.first_seconds,
            forwards=len(steps),
            steps=times if len(rows) == len(steps) else None,
        )
