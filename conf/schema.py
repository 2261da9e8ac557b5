"""What a stage's dataclass says of its settings: the values that a field may have, and the check of them.

A nested dataclass makes names with a dot. A dict of Any holds a library's own settings, which have any name.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import field, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

MISSING: Any = "???"  # as in OmegaConf, which an export does not have
PATH = {"path": True}
MODEL = {**PATH, "hub": "model"}
TOKENIZER = {**PATH, "hub": "tokenizer"}
IN_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
}
IN_WORDS[list] = "a list"
ACCEPTED: dict[type, Any] = {int: Integral, float: Real, list: (list, tuple)}
LARGEST = 2**63  # beyond it no array holds a whole number


def kinds(schema: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name."""
    hints = _hints(schema)
    return {field.name: hints[field.name] for field in fields(schema)}


_hints = cache(get_type_hints)


def types_of(kind: Any) -> list[Any]:
    """Return a type and, of a union, what it is of."""
    return [kind, *(get_args(kind) if get_origin(kind) in (Union, UnionType) else ())]


def setting(
    default: Any = MISSING,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Sequence[Any] = (),
    path: bool = False,
    hub: str | None = None,
) -> Any:
    """Return a dataclass field with the limits that `check_settings` holds its value, or each of a list's, to.

    Without a `default` the setting is required. `path` marks a file or folder, `hub` a hub name ("model",
    "tokenizer") that is taken as well. Null is no value: no limit applies to it.
    """
    limits = {"least": least, "most": most, "above": above, "below": below}
    metadata: dict[str, Any] = {
        name: value for name, value in limits.items() if value is not None
    }
    metadata |= {"choices": tuple(choices)} if choices else {}
    metadata |= {"path": True} if path or hub else {}
    metadata |= {"hub": hub} if hub else {}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_settings(config: Any, group: str = "") -> None:
    """Check the fields of a dataclass of settings; call it in `__post_init__`.

    Numbers of any library become Python's. Raises ValueError, naming `group.field`, for a value of another
    type, one outside its field's limits, and one that is none of its field's choices.
    """
    types = kinds(type(config))
    for item in fields(config):
        value = getattr(config, item.name)
        name = f"{group}.{item.name}".lstrip(".")
        if value is not None and value != MISSING and not is_dataclass(value):
            setattr(
                config,
                item.name,
                _checked(value, types[item.name], item.metadata, name),
            )


def _checked(value: Any, hint: Any, limits: Mapping[str, Any], name: str) -> Any:
    kind = next(
        (kind for kind in types_of(hint) if (get_origin(kind) or kind) in IN_WORDS),
        None,
    )
    if kind is None:
        return value
    if get_origin(kind) is list and isinstance(value, list | tuple):
        return [_checked(member, get_args(kind)[0], limits, name) for member in value]
    accepted = ACCEPTED.get(kind, get_origin(kind) or kind)
    if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
        raise ValueError(
            f"{name} must be {IN_WORDS[get_origin(kind) or kind]}, got {value!r:.60}"
        )
    if kind in (int, float):
        if not (-LARGEST < value < LARGEST and _within(value, limits)):
            raise ValueError(f"{name} must be {_range(limits)}, got {value}")
        value = kind(value)
    choices = limits.get("choices", ())
    if choices and value not in choices:
        raise ValueError(f"{name} must be {any_of(choices)}, got {value or 'nothing'}")
    return value


def _within(value: float, limits: Mapping[str, Any]) -> bool:
    return limits.get("least", -math.inf) <= value <= limits.get(
        "most", math.inf
    ) and limits.get("above", -math.inf) < value < limits.get("below", math.inf)


def _range(limits: Mapping[str, Any]) -> str:
    """Return limits in words: "1 to 16", "above 0 and at most 1"."""
    if "least" in limits and "most" in limits:
        return f"{limits['least']} to {limits['most']}"
    words = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
    if {"least", "below"} == limits.keys() & words.keys():
        return f"from {limits['least']} to below {limits['below']}"
    given = [f"{word} {limits[name]}" for name, word in words.items() if name in limits]
    return " and ".join(given) or "a finite number of up to 63 bits"


def any_of(choices: Sequence[Any]) -> str:
    """Return choices in words: "a, b or c"."""
    (*others, last) = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def take_types(config: Any, group: str) -> None:
    """Bring the values of a dataclass that a program made to its fields' types: any library's numbers to
    Python's.

    Knows the types of IN_WORDS, and None where a field may be that. Raises ValueError, naming `group.field`,
    for a value of another: true is no number, and a text is none either.
    """
    for name, hint in kinds(type(config)).items():
        value = getattr(config, name)
        types = [get_origin(kind) or kind for kind in types_of(hint)]
        if value is None and NoneType in types:
            continue
        kind = next(kind for kind in types if kind in IN_WORDS)
        fits = isinstance(value, ACCEPTED.get(kind, kind)) and isinstance(
            value, bool
        ) == (kind is bool)
        if not fits or (
            kind is list and not all(isinstance(text, str) for text in value)
        ):
            raise ValueError(
                f"{group}.{name} must be {IN_WORDS[kind]}, got {value!r:.60}"
            )
        if kind in (int, float):
            try:
                setattr(config, name, kind(value))
            except OverflowError as error:
                raise ValueError(
                    f"{group}.{name} must be a finite number, got {value!r:.60}"
                ) from error
