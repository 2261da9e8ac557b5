"""What callers ask for: prompts and seeds of every kind, taken as they come or refused in a sentence."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Number
from typing import TypeAlias

import numpy as np
import torch

from conf import UserError
from infer.config import SIDE_BY_SIDE, Infill
from infer.engine.sampling import SEEDS
from infer.text import Text

Prompt: TypeAlias = str | Infill | Iterable[int]
Taken: TypeAlias = str | Infill | list


def batch_of(prompts: object) -> tuple[list[Taken], list[str]]:
    """Return the prompts, and what to call each in a sentence."""
    items = _taken(prompts, "prompt")
    if (
        isinstance(items, str | Infill)
        or not items
        or any(isinstance(id, Number) for id in items)
    ):
        return [items], ["prompt"]
    if len(items) > SIDE_BY_SIDE:
        raise UserError(
            f"prompts must be 1 to {SIDE_BY_SIDE} side by side, got {len(items)}"
        )
    names = [f"prompts[{index}]" for index in range(len(items))]
    return [_taken(prompt, name) for prompt, name in zip(items, names)], names


def _taken(prompt: object, name: str) -> Taken:
    """Return a text or an Infill as it is, and anything else as a list of its items."""
    if isinstance(prompt, str | Infill):
        return prompt
    if (items := _items(prompt)) is None:
        raise UserError(
            f"{name} must be a text, an Infill or token ids, got {type(prompt).__name__}"
        )
    return items


def _items(value: object) -> list | None:
    items = value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value
    return (
        list(items)
        if isinstance(items, Iterable) and not isinstance(items, str | bytes | Mapping)
        else None
    )


def seeds_of(seeds: object, default: int, count: int) -> list[int]:
    """Return a seed for each of `count` prompts."""
    if seeds is None:
        return [default] * count
    items = _items(seeds) or []
    if len(items) != count or not all(
        isinstance(seed, Integral) and 0 <= int(seed) < SEEDS for seed in items
    ):
        given = items or seeds
        raise UserError(
            f"seeds must be one of up to 63 bits for each of {count} prompts, got {given}"
        )
    return [int(seed) for seed in items]


def ids_of(prompt: Taken, name: str, *, text: Text, rows: int) -> list[int]:
    """Return (n,) token ids below `rows`, at least one."""
    if isinstance(prompt, Infill):
        if not prompt.prefix and not prompt.suffix:
            raise UserError(f"{name} must have a prefix or a suffix, got neither")
        return text.infill(prompt)
    if not len(prompt):
        raise UserError(f"{name} must be a text or token ids, got nothing")
    if isinstance(prompt, str):
        if not (ids := text.encode(prompt)):
            raise UserError(
                f"{name} must be a text of at least one token, got {prompt!r}"
            )
        return ids
    if strange := [id for id in prompt if not isinstance(id, Integral)]:
        raise UserError(f"{name} must be token ids, whole numbers, got {strange[0]!r}")
    ids = [int(id) for id in prompt]
    beyond = next((id for id in ids if not 0 <= id < rows), None)
    if beyond is not None:
        raise UserError(
            f"{name} must be ids of the model's vocabulary, 0 to {rows - 1}, got {beyond}"
        )
    return ids


def check_lengths(
    ids: Sequence[Sequence[int]],
    names: Sequence[str],
    *,
    new: int,
    context: int,
    setting: str = "decode.max_new_tokens",
) -> None:
    """Raise UserError where a prompt and `new` tokens, by `setting`, exceed the model's context."""
    for prompt, name in zip(ids, names):
        n = len(prompt)
        room = f"the model's context of {context}"
        if n >= context:
            raise UserError(f"{name} must have fewer tokens than {room}, got {n}")
        if n + new > context:
            raise UserError(
                f"{setting} must be at most {context - n} for {name} of {n} tokens in {room}, got {new}"
            )
