"""Check the prompts and seeds of a caller, and encode the prompts as token ids."""

from collections.abc import Iterable, Sequence
from numbers import Integral, Number
from typing import Any, TypeAlias

import numpy as np
import torch

from conf.errors import UserError
from infer.config import Infill
from infer.engine.sampling import SEEDS
from infer.text import Text

Prompt: TypeAlias = str | Infill | Sequence[int]


def batch_of(prompts: Prompt | Iterable[Prompt]) -> tuple[list[Prompt], list[str]]:
    """Return a list of the prompts, and a name for each in errors: "prompt" or "prompts[i]".

    Token ids may be a tensor or an array. Raises UserError for another type.
    """
    items = _items(prompts, "prompt")
    if isinstance(items, str | Infill) or not items or isinstance(items[0], Number):
        return [items], ["prompt"]
    names = [f"prompts[{index}]" for index in range(len(items))]
    return [_items(prompt, name) for prompt, name in zip(items, names)], names


def _items(value: Any, name: str) -> Any:
    """Return a text or an Infill unchanged, and any other iterable as a list."""
    if isinstance(value, str | Infill):
        return value
    items = _listed(value)
    if items is None:
        raise UserError(
            f"{name} must be a text, an Infill or token ids, got {type(value).__name__}"
        )
    return items


def _listed(value: Any) -> list[Any] | None:
    """Return an array or another iterable as a list; None for other values, bytes and a dict."""
    if isinstance(value, torch.Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, bytes | dict) or not isinstance(value, Iterable):
        return None
    return list(value)


def ids_of(prompt: Prompt, name: str, *, text: Text, rows: int) -> list[int]:
    """Return the (n,) token ids of a prompt.

    Raises UserError for an empty prompt, and for an id outside of 0 to `rows` - 1.
    """
    if isinstance(prompt, Infill):
        return text.infill(prompt)
    ids: Sequence[int] = []
    if prompt:
        ids = text.encode(prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise UserError(
            f"{name} must have at least one token, got {prompt!r}. Add text."
        )
    invalid = [id for id in ids if not _is_below(rows, id)]
    if invalid:
        raise UserError(
            f"{name} must be token ids of the model, integers from 0 to "
            f"{rows - 1}, got {invalid[0]!r}"
        )
    return [int(id) for id in ids]


def check_length(
    prompt: Sequence[int],
    name: str,
    *,
    new: int,
    context: int,
    setting: str = "decode.max_new_tokens",
    cure: str = "shorten the prompt",
) -> None:
    """Raise UserError if a prompt and `new` tokens exceed the model's context length.

    `setting` is the name of the setting for `new`, and `cure` what else to change.
    """
    if len(prompt) + new > context:
        raise UserError(
            f"{name} and {setting} must fit the model's context of {context} tokens, got "
            f"{len(prompt)} + {new}. Lower {setting}, or {cure}."
        )


def seeds_of(seeds: Any, default: int, count: int) -> list[int]:
    """Return a seed for each of `count` prompts. Raises UserError for invalid seeds."""
    values = [default] * count if seeds is None else _listed(seeds)
    if (
        values is None
        or len(values) != count
        or not all(_is_below(SEEDS, seed) for seed in values)
    ):
        raise UserError(
            f"seeds must be {count} integers from 0 to 2**63 - 1, one for each prompt, "
            f"got {seeds if values is None else values}. Omit seeds to use decode.seed."
        )
    return [int(seed) for seed in values]


def _is_below(end: int, value: Any) -> bool:
    return isinstance(value, Integral) and 0 <= int(value) < end
