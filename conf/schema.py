"""What a stage's dataclass holds: the names and types of its settings, and which values they may have.

A nested dataclass makes names with a dot. A dict of Any is a library's own: what lies in it has any name. A
field's metadata may be

    bare   a bare value of its dataclass is for this field: `draft=DIR` is `draft.model=DIR`
    path   it names a file, a folder or a list of them; True, or the name of the property that lists them
    hub    model or tokenizer: a hub name is taken as well (conf/hub.py)
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import Field, field, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from conf.errors import UserError, in_one_line

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
# How an error names a setting: at its start, or as a suggestion at its end.
_NAMED = re.compile(
    r"(?:unknown )?setting '(?P<quoted>[\w.]+)'|(?P<name>[A-Za-z_][\w.]*)(?=[=:,\[]| must )"
)
_MEANT = re.compile(r"did you mean '(?P<meant>[\w.]+)'\?$")


def kinds(schema: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name."""
    hints = _hints(schema)
    return {field.name: hints[field.name] for field in fields(schema)}


_hints = cache(get_type_hints)


def types_of(kind: Any) -> list[Any]:
    """Return a type and, of a union, what it is of."""
    return [kind, *(get_args(kind) if get_origin(kind) in (Union, UnionType) else ())]


def bare(schema: Any) -> str | None:
    """Return the field that a bare value of a dataclass is for."""
    return next(
        (field.name for field in fields(schema) if field.metadata.get("bare")), None
    )


def fields_of(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """Yield every setting: its name, the dataclass and field that it is in, and its type."""
    for item, kind in zip(fields(schema), kinds(schema).values()):
        name = prefix + item.name
        if is_dataclass(kind):
            yield from fields_of(kind, f"{name}.")
        else:
            yield (
                prefix.removesuffix(".") if item.metadata.get("bare") else name,
                schema,
                item.name,
                kind,
            )


def names(schema: Any) -> list[str]:
    """Return the names of all settings."""
    return [name for name, *_ in fields_of(schema)]


def place(schema: Any, name: str) -> str | None:
    """Return the setting, or the group of them, that a name means; None where it means none.

    What lies in a library's own settings is where these are.
    """
    kind = schema
    parts: list[str] = []
    for part in name.split("."):
        if get_origin(kind) is dict:
            break
        if not is_dataclass(kind) or part not in kinds(kind):
            return None
        if part == bare(kind):
            break
        parts.append(part)
        kind = kinds(kind)[part]
    return ".".join(parts)


def kind_of(name: str, schema: Any) -> tuple[Any, bool]:
    """Return a setting's type, Any in a library's own, and whether it lies directly in a dict."""
    kind = schema
    inside = False
    for part in name.split("."):
        inside = get_origin(kind) is dict
        if inside:
            kind = get_args(kind)[1]
        elif kind is Any:
            inside = True
        else:
            kind = kinds(kind).get(part) if is_dataclass(kind) else None
    return kind, inside


def named_setting(sentence: str, schema: type, groups: Sequence[str]) -> str | None:
    """Return the setting or group that a sentence begins with, or suggests at its end; None for neither."""
    if match := _MEANT.search(sentence) or _NAMED.match(sentence):
        name = next(filter(None, match.groupdict().values()))
        return name if name in groups else place(schema, name)
    return None


def check_values(value: Any, kind: Any, name: str = "") -> None:
    """Raise ValueError for values that OmegaConf accepts and nothing can go on with.

    A number that is not finite (NaN compares as no limit does, and JSON has none) or of more than 63 bits, and
    containers in a list of single values. `value` is what a dataclass `kind` is made of, as plain values.
    """
    if isinstance(value, Mapping):
        types = kinds(kind) if is_dataclass(kind) else {}
        inner = get_args(kind)[1] if get_origin(kind) is dict else Any
        for key, member in value.items():
            check_values(member, types.get(key, inner), f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        inner = next(
            (get_args(type)[0] for type in types_of(kind) if get_origin(type) is list),
            Any,
        )
        for member in value:
            if isinstance(member, list | Mapping) and inner is not Any:
                raise ValueError(
                    f"{name} must be a list of single values, got {member} in it"
                )
            check_values(member, inner, name)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")
    elif isinstance(value, int) and not -LARGEST <= value < LARGEST:
        raise ValueError(f"{name} must be a number of up to 63 bits, got {value}")


def values_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yield every setting of an instance: its name, the dataclass that it is in, and its item there."""
    for item in fields(config):
        value = getattr(config, item.name)
        name = prefix + item.name
        if is_dataclass(value):
            yield from values_of(value, f"{name}.")
        elif not isinstance(value, Mapping):
            yield (
                prefix.removesuffix(".") if item.metadata.get("bare") else name,
                config,
                item,
            )


def check_paths(config: Any) -> None:
    """Raise UserError for a path that the operating system refuses, before anything is done.

    What is not there is no mistake yet: it may be made, or be a name on the hub.
    """
    for name, owner, item in values_of(config):
        if listed := item.metadata.get("path"):
            value = getattr(owner, item.name if listed is True else listed)
            for path in value if isinstance(value, list) else [value]:
                _check_path(name, path)


def _check_path(name: str, path: str | None) -> None:
    try:
        if path:
            path.encode()
            os.stat(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UserError(
            f"{name}={path} must be a path that the system can open, got '{error.strerror}'. Give another path."
        ) from error
    except (
        ValueError
    ) as error:  # a NUL byte, or half of a surrogate pair: a name that is no UTF-8
        raise UserError(
            f"{name}={path} must be a path in UTF-8 without NUL bytes, got '{in_one_line(error)}'. "
            "Rename the file or folder."
        ) from error


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
        raise ValueError(f"{name} must be {_any_of(choices)}, got {value or 'nothing'}")
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


def _any_of(choices: Sequence[Any]) -> str:
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
