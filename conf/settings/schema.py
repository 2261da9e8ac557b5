"""Declare settings as dataclass fields with types, limits and choices, and check their values.

A nested dataclass is a group: its settings are named GROUP.NAME. A dict of Any is a group of settings of
another library, which may have any name.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import field, fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

MISSING: Any = "???"  # OmegaConf's value; exported code cannot import OmegaConf

TYPE_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
}
ACCEPTED: dict[type, Any] = {
    bool: bool,
    int: Integral,
    float: Real,
    str: str,
    list: (list, tuple),
}
LARGEST = 2**63 - 1  # the largest int64


def field_types(schema: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name."""
    hints = _hints(schema)
    return {field.name: hints[field.name] for field in fields(schema)}


_hints = cache(get_type_hints)


def union_members(kind: Any) -> list[Any]:
    """Return a type and, if it is a union, its members."""
    return [kind, *(get_args(kind) if get_origin(kind) in (Union, UnionType) else ())]


def setting(
    default: Any = MISSING,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Sequence[Any] = (),
    hub: str | None = None,
    path: bool = False,
) -> Any:
    """Return a dataclass field with limits, which `check_settings` checks.

    `least` and `most` are inclusive limits, `above` and `below` exclusive. The limits of a list apply to its
    members. Without a `default` the setting is required. If `path`, the value is a path or a list of paths
    (see conf.settings.paths). If `hub` is "model" or "tokenizer", the value is a path or a name on the hub.
    """
    given: dict[str, Any] = {
        "least": least,
        "most": most,
        "above": above,
        "below": below,
        "choices": tuple(choices) or None,
        "hub": hub,
        "path": path or hub is not None or None,
    }
    metadata = {name: value for name, value in given.items() if value is not None}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_settings(config: Any, group: str = "") -> None:
    """Check the fields of a settings dataclass; call it in `__post_init__`.

    Numbers of other libraries become Python numbers. Raises ValueError, naming `group.field`, for a value of
    another type, outside its limits, or not among its choices.
    """
    types = field_types(type(config))
    for item in fields(config):
        value = getattr(config, item.name)
        name = f"{group}.{item.name}".lstrip(".")
        if value != MISSING:
            checked = _checked(value, types[item.name], item.metadata, name)
            setattr(config, item.name, checked)


def _checked(value: Any, hint: Any, limits: Mapping[str, Any], name: str) -> Any:
    by_origin = {get_origin(kind) or kind: kind for kind in union_members(hint)}
    kind = next((kind for kind in by_origin if kind in TYPE_NAMES), None)
    if kind is None or (value is None and NoneType in by_origin):
        return value
    got = value if value != "" else "nothing"
    if not isinstance(value, ACCEPTED[kind]) or isinstance(value, bool) != (
        kind is bool
    ):
        expected = TYPE_NAMES[kind]
        got = f"{value!r:.60}"
    elif kind is list:
        (member_hint,) = get_args(by_origin[list])
        return [_checked(member, member_hint, limits, name) for member in value]
    elif kind in (int, float) and not _within(value, limits):
        unlimited = not limits.keys() & {"most", "below"}
        if limits and unlimited and LARGEST < value < math.inf:
            limits = {**limits, "most": LARGEST}
        expected = range_in_words(limits)
        if isinstance(value, float) and not math.isfinite(value) and limits:
            expected = f"finite and {expected}"
    elif value not in limits.get("choices", (value,)):
        expected = any_of(limits["choices"])
    else:
        return kind(value)
    raise ValueError(f"{name} must be {expected}, got {got}")


def _within(value: float, limits: Mapping[str, Any]) -> bool:
    closed = limits.get("least", -LARGEST), limits.get("most", LARGEST)
    above, below = limits.get("above", -math.inf), limits.get("below", math.inf)
    return bool(closed[0] <= value <= closed[1] and above < value < below)


def range_in_words(limits: Mapping[str, Any]) -> str:
    """Describe limits: "1 to 16", "above 0 and at most 1"."""
    if "least" in limits and "most" in limits:
        return f"{limits['least']} to {limits['most']}"
    words = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
    if {"least", "below"} == limits.keys() & words.keys():
        return f"from {limits['least']} to below {limits['below']}"
    given = [f"{word} {limits[name]}" for name, word in words.items() if name in limits]
    return " and ".join(given) or "a finite number of up to 63 bits"


def any_of(choices: Sequence[Any]) -> str:
    """Describe choices: "a, b or c"."""
    (*others, last) = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def is_http_url(text: str) -> bool:
    """Return True if a text is an HTTP URL with a host and without credentials."""
    try:
        url = urlsplit(text)
        return (
            url.scheme in ("http", "https")
            and bool(url.hostname)
            and url.port != 0
            and url.username is None
            and text.split() == [text]
        )
    except ValueError:
        return False
